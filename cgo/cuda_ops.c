//go:build cgo && linux

#include "cuda_lib.h"

#include <string.h>

/* Evaluates a call with ctx current on this thread, whatever was before, and puts that back. The call's own result counts. */
#define IN(d, ctx, call) \
	do { \
		int r_ = (d)->push(ctx); \
		if (r_) \
			return r_; \
		r_ = (call); \
		void *was_; \
		int p_ = (d)->pop(&was_); \
		return r_ ? r_ : p_; \
	} while (0)

#define NEED(d, function) \
	do { \
		if (!(d)->function) \
			return HR_CUDA_LACKS; \
	} while (0)

static void *host(uint64_t address) { return (void *)(uintptr_t)address; }

int hr_cuda_alloc(struct hr_cuda *d, void *ctx, uint64_t bytes, uint64_t *ptr) { IN(d, ctx, d->alloc(ptr, bytes)); }
int hr_cuda_free(struct hr_cuda *d, void *ctx, uint64_t ptr) { IN(d, ctx, d->free(ptr)); }

/* The driver's own fill returns before it is done, and streams that do not block do not wait for it. */
static int fill(struct hr_cuda *d, uint64_t ptr, uint32_t byte, uint64_t bytes)
{
	int r = d->fill(ptr, (unsigned char)byte, bytes);
	return r ? r : d->stream_sync(NULL);
}

int hr_cuda_fill(struct hr_cuda *d, void *ctx, uint64_t ptr, uint32_t byte, uint64_t bytes) { IN(d, ctx, fill(d, ptr, byte, bytes)); }

int hr_cuda_host_alloc(struct hr_cuda *d, void *ctx, uint64_t bytes, uint64_t *ptr)
{
	void *p = NULL;
	int r = d->push(ctx);
	if (r)
		return r;
	r = d->host_alloc(&p, bytes, CU_HOST_PORTABLE);
	*ptr = (uintptr_t)p;
	void *was;
	int popped = d->pop(&was);
	return r ? r : popped;
}

int hr_cuda_host_free(struct hr_cuda *d, void *ctx, uint64_t ptr) { IN(d, ctx, d->host_free(host(ptr))); }
int hr_cuda_host_register(struct hr_cuda *d, void *ctx, uint64_t ptr, uint64_t bytes) { IN(d, ctx, d->host_register(host(ptr), bytes, CU_HOST_PORTABLE)); }
int hr_cuda_host_unregister(struct hr_cuda *d, void *ctx, uint64_t ptr) { IN(d, ctx, d->host_unregister(host(ptr))); }

static hr_alloc_prop segment(int ordinal, int gdr)
{
	hr_alloc_prop p;
	memset(&p, 0, sizeof(p));
	p.type = CU_ALLOCATION_PINNED;
	p.location.type = CU_LOCATION_DEVICE;
	p.location.id = ordinal;
	p.flags.gdr_capable = gdr != 0;
	return p;
}

int hr_cuda_granularity(struct hr_cuda *d, int ordinal, uint64_t *bytes)
{
	NEED(d, granularity);
	hr_alloc_prop p = segment(ordinal, 0);
	size_t n = 0;
	int r = d->granularity(&n, &p, CU_GRANULARITY_RECOMMENDED);
	*bytes = n;
	return r;
}

int hr_cuda_reserve(struct hr_cuda *d, void *ctx, uint64_t bytes, uint64_t *ptr)
{
	NEED(d, reserve);
	IN(d, ctx, d->reserve(ptr, bytes, 0, 0, 0));
}

int hr_cuda_unreserve(struct hr_cuda *d, void *ctx, uint64_t ptr, uint64_t bytes)
{
	NEED(d, unreserve);
	IN(d, ctx, d->unreserve(ptr, bytes));
}

/* The mapping keeps the memory once its handle is dropped. */
static int map_segment(struct hr_cuda *d, int ordinal, uint64_t ptr, uint64_t bytes, int gdr)
{
	hr_alloc_prop p = segment(ordinal, gdr);
	hr_access a = { .location = p.location, .flags = CU_ACCESS_READ_WRITE };
	uint64_t handle = 0;
	int r = d->create(&handle, bytes, &p, 0);
	if (r)
		return r;
	r = d->map(ptr, bytes, 0, handle, 0);
	int dropped = d->drop(handle);
	if (r)
		return r;
	r = d->access(ptr, bytes, &a, 1);
	if (!r)
		r = dropped;
	if (r) /* the caller gives the addresses back, which a driver refuses while they are mapped */
		d->unmap(ptr, bytes);
	return r;
}

int hr_cuda_map(struct hr_cuda *d, void *ctx, int ordinal, uint64_t ptr, uint64_t bytes, int gdr)
{
	NEED(d, create);
	NEED(d, drop);
	NEED(d, map);
	NEED(d, unmap);
	NEED(d, access);
	IN(d, ctx, map_segment(d, ordinal, ptr, bytes, gdr));
}

int hr_cuda_unmap(struct hr_cuda *d, void *ctx, uint64_t ptr, uint64_t bytes)
{
	NEED(d, unmap);
	IN(d, ctx, d->unmap(ptr, bytes));
}

static int describe(struct hr_cuda *d, uint64_t ptr, struct hr_pointer *p)
{
	size_t size = 0;
	int r = d->range(&p->base, &size, ptr);
	if (r)
		return r;
	p->size = size;
	r = d->pointer_get(&p->device, CU_PTR_DEVICE, ptr);
	if (r)
		return r;
	int yes = 0; /* wide enough, whichever width the driver gives its booleans */
	p->legacy = d->pointer_get(&yes, CU_PTR_LEGACY_IPC, ptr) == CU_SUCCESS && yes;
	yes = 0;
	p->gdr = d->pointer_get(&yes, CU_PTR_GDR, ptr) == CU_SUCCESS && yes;
	return CU_SUCCESS;
}

int hr_cuda_pointer(struct hr_cuda *d, void *ctx, uint64_t ptr, struct hr_pointer *p)
{
	memset(p, 0, sizeof(*p));
	IN(d, ctx, describe(d, ptr, p));
}

/* Synchronous copies of the engine's to memory that a NIC reads are then done when they return. */
int hr_cuda_sync_memops(struct hr_cuda *d, void *ctx, uint64_t ptr)
{
	unsigned int on = 1;
	IN(d, ctx, d->pointer_set(&on, CU_PTR_SYNC_MEMOPS, ptr));
}

int hr_cuda_export(struct hr_cuda *d, void *ctx, uint64_t ptr, uint64_t bytes, uint64_t flags, int *fd)
{
	NEED(d, export_range);
	*fd = -1;
	IN(d, ctx, d->export_range(fd, ptr, bytes, CU_RANGE_DMA_BUF, flags));
}

int hr_cuda_flush_rdma(struct hr_cuda *d, void *ctx)
{
	NEED(d, flush);
	IN(d, ctx, d->flush(CU_FLUSH_CURRENT_CTX, CU_FLUSH_TO_OWNER));
}

int hr_cuda_ipc_get(struct hr_cuda *d, void *ctx, uint64_t ptr, struct hr_cuda_ipc *h) { IN(d, ctx, d->ipc_get((hr_ipc *)h, ptr)); }

int hr_cuda_ipc_open(struct hr_cuda *d, void *ctx, const struct hr_cuda_ipc *h, uint64_t *ptr)
{
	hr_ipc handle;
	memcpy(&handle, h, sizeof(handle));
	IN(d, ctx, d->ipc_open(ptr, handle, CU_IPC_LAZY_PEER_ACCESS));
}

int hr_cuda_ipc_close(struct hr_cuda *d, void *ctx, uint64_t ptr) { IN(d, ctx, d->ipc_close(ptr)); }

int hr_cuda_stream(struct hr_cuda *d, void *ctx, void **stream) { IN(d, ctx, d->stream(stream, CU_STREAM_NON_BLOCKING)); }
int hr_cuda_stream_free(struct hr_cuda *d, void *ctx, void *stream) { IN(d, ctx, d->stream_free(stream)); }
int hr_cuda_stream_sync(struct hr_cuda *d, void *ctx, void *stream) { IN(d, ctx, d->stream_sync(stream)); }
int hr_cuda_stream_wait(struct hr_cuda *d, void *ctx, void *stream, void *event) { IN(d, ctx, d->stream_wait(stream, event, 0)); }

static int copies(struct hr_cuda *d, void *stream, uint32_t kind, const struct hr_copy *c, uint32_t n, uint32_t *done)
{
	for (*done = 0; *done < n; ++*done, c++) {
		int r = CU_INVALID_VALUE;
		switch (kind) {
		case HR_COPY_DEVICE:
			r = d->copy_device(c->dst, c->src, c->len, stream);
			break;
		case HR_COPY_TO_DEVICE:
			r = d->copy_to_device(c->dst, host(c->src), c->len, stream);
			break;
		case HR_COPY_TO_HOST:
			r = d->copy_to_host(host(c->dst), c->src, c->len, stream);
			break;
		}
		if (r)
			return r;
	}
	return CU_SUCCESS;
}

int hr_cuda_copies(struct hr_cuda *d, void *ctx, void *stream, uint32_t kind, const struct hr_copy *c, uint32_t n, uint32_t *done)
{
	IN(d, ctx, copies(d, stream, kind, c, n, done));
}

int hr_cuda_event(struct hr_cuda *d, void *ctx, int timing, int ipc, void **event)
{
	IN(d, ctx, d->event(event, (timing ? 0 : CU_EVENT_DISABLE_TIMING) | (ipc ? CU_EVENT_INTERPROCESS : 0)));
}

int hr_cuda_event_free(struct hr_cuda *d, void *ctx, void *event) { IN(d, ctx, d->event_free(event)); }
int hr_cuda_event_record(struct hr_cuda *d, void *ctx, void *event, void *stream) { IN(d, ctx, d->event_record(event, stream)); }
int hr_cuda_event_query(struct hr_cuda *d, void *ctx, void *event) { IN(d, ctx, d->event_query(event)); }
int hr_cuda_event_sync(struct hr_cuda *d, void *ctx, void *event) { IN(d, ctx, d->event_sync(event)); }
int hr_cuda_event_elapsed(struct hr_cuda *d, void *ctx, void *from, void *to, float *ms) { IN(d, ctx, d->event_elapsed(ms, from, to)); }
int hr_cuda_event_ipc_get(struct hr_cuda *d, void *ctx, void *event, struct hr_cuda_ipc *h) { IN(d, ctx, d->event_ipc_get((hr_ipc *)h, event)); }

int hr_cuda_event_ipc_open(struct hr_cuda *d, void *ctx, const struct hr_cuda_ipc *h, void **event)
{
	hr_ipc handle;
	memcpy(&handle, h, sizeof(handle));
	IN(d, ctx, d->event_ipc_open(event, handle));
}
