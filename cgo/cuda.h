#ifndef HEADRACE_CUDA_H
#define HEADRACE_CUDA_H

/*
 * The part of the CUDA driver API that is used, declared here: nothing of CUDA is needed to build, and libcuda.so.1 is opened
 * at run time. Functions that can fail return a CUresult, 0 for none, or HR_CUDA_LACKS where the driver has no such function.
 * Those that work in a context make it current for the call and put back what was current before, since the caller's
 * goroutine may be on another thread each time.
 */

#include <stdint.h>

#define HR_CUDA_LACKS (-1) /* the driver is too old for this */

#define HR_CUDA_DETAIL_BYTES 256
#define HR_CUDA_NAME_BYTES 96
#define HR_CUDA_BUS_BYTES 16
#define HR_CUDA_IPC_BYTES 64

struct hr_cuda; /* one opened driver; never closed, since it leaves threads and handlers behind */

/* A device. Attributes that the driver does not know are 0. */
struct hr_gpu {
	char name[HR_CUDA_NAME_BYTES];
	char bus[HR_CUDA_BUS_BYTES]; /* as 0000:3b:00.0 */
	uint8_t uuid[16];
	uint64_t memory;
	int32_t ordinal, major, minor;
	int32_t dmabuf, gdr, gdr_vmm, vmm, unified; /* 1: supported */
	int32_t gdr_ordering, gdr_flush;
	int32_t integrated, reserved;
};

/* One copy of a batch. */
struct hr_copy {
	uint64_t dst, src, len;
};

enum hr_copy_kind { HR_COPY_DEVICE, HR_COPY_TO_DEVICE, HR_COPY_TO_HOST };

struct hr_cuda_ipc {
	uint8_t handle[HR_CUDA_IPC_BYTES];
};

/* What lies at a device address. */
struct hr_pointer {
	uint64_t base, size; /* the allocation; of mapped memory the mapping that holds the address */
	int32_t device, gdr, legacy, reserved; /* legacy: cuIpcGetMemHandle takes it */
};

/* Opens a driver by its soname or path and initialises it. state is 0: done, 1: not there, 2: the answer in result. */
struct hr_cuda *hr_cuda_open(const char *library, int *state, int *result, char detail[HR_CUDA_DETAIL_BYTES]);
int hr_cuda_version(struct hr_cuda *d, int *version);
int hr_cuda_count(struct hr_cuda *d, int *n);
int hr_cuda_device(struct hr_cuda *d, int ordinal, struct hr_gpu *g);
/* The driver's name of a result and what it means, "" if it knows none. */
void hr_cuda_words(struct hr_cuda *d, int result, char name[HR_CUDA_DETAIL_BYTES], char text[HR_CUDA_DETAIL_BYTES]);

int hr_cuda_retain(struct hr_cuda *d, int ordinal, void **ctx);
int hr_cuda_release(struct hr_cuda *d, int ordinal);

int hr_cuda_alloc(struct hr_cuda *d, void *ctx, uint64_t bytes, uint64_t *ptr);
int hr_cuda_free(struct hr_cuda *d, void *ctx, uint64_t ptr);
int hr_cuda_fill(struct hr_cuda *d, void *ctx, uint64_t ptr, uint32_t byte, uint64_t bytes);
int hr_cuda_host_alloc(struct hr_cuda *d, void *ctx, uint64_t bytes, uint64_t *ptr);
int hr_cuda_host_free(struct hr_cuda *d, void *ctx, uint64_t ptr);
int hr_cuda_host_register(struct hr_cuda *d, void *ctx, uint64_t ptr, uint64_t bytes);
int hr_cuda_host_unregister(struct hr_cuda *d, void *ctx, uint64_t ptr);

/* Memory of segments mapped one after the other, as allocators that grow make it. */
int hr_cuda_granularity(struct hr_cuda *d, int ordinal, uint64_t *bytes);
int hr_cuda_reserve(struct hr_cuda *d, void *ctx, uint64_t bytes, uint64_t *ptr);
int hr_cuda_map(struct hr_cuda *d, void *ctx, int ordinal, uint64_t ptr, uint64_t bytes, int gdr);
int hr_cuda_unmap(struct hr_cuda *d, void *ctx, uint64_t ptr, uint64_t bytes);
int hr_cuda_unreserve(struct hr_cuda *d, void *ctx, uint64_t ptr, uint64_t bytes);

int hr_cuda_pointer(struct hr_cuda *d, void *ctx, uint64_t ptr, struct hr_pointer *p);
int hr_cuda_sync_memops(struct hr_cuda *d, void *ctx, uint64_t ptr);
int hr_cuda_export(struct hr_cuda *d, void *ctx, uint64_t ptr, uint64_t bytes, uint64_t flags, int *fd);
int hr_cuda_flush_rdma(struct hr_cuda *d, void *ctx);

int hr_cuda_ipc_get(struct hr_cuda *d, void *ctx, uint64_t ptr, struct hr_cuda_ipc *h);
int hr_cuda_ipc_open(struct hr_cuda *d, void *ctx, const struct hr_cuda_ipc *h, uint64_t *ptr);
int hr_cuda_ipc_close(struct hr_cuda *d, void *ctx, uint64_t ptr);

int hr_cuda_stream(struct hr_cuda *d, void *ctx, void **stream);
int hr_cuda_stream_free(struct hr_cuda *d, void *ctx, void *stream);
int hr_cuda_stream_sync(struct hr_cuda *d, void *ctx, void *stream);
int hr_cuda_stream_wait(struct hr_cuda *d, void *ctx, void *stream, void *event);
/* Queues n copies; done says how many it took. */
int hr_cuda_copies(struct hr_cuda *d, void *ctx, void *stream, uint32_t kind, const struct hr_copy *c, uint32_t n, uint32_t *done);

int hr_cuda_event(struct hr_cuda *d, void *ctx, int timing, int ipc, void **event);
int hr_cuda_event_free(struct hr_cuda *d, void *ctx, void *event);
int hr_cuda_event_record(struct hr_cuda *d, void *ctx, void *event, void *stream);
int hr_cuda_event_query(struct hr_cuda *d, void *ctx, void *event);
int hr_cuda_event_sync(struct hr_cuda *d, void *ctx, void *event);
int hr_cuda_event_elapsed(struct hr_cuda *d, void *ctx, void *from, void *to, float *ms);
int hr_cuda_event_ipc_get(struct hr_cuda *d, void *ctx, void *event, struct hr_cuda_ipc *h);
int hr_cuda_event_ipc_open(struct hr_cuda *d, void *ctx, const struct hr_cuda_ipc *h, void **event);

/* sizeof of the n-th struct above, as the C compiler sees it; 0 beyond the last. */
uint64_t hr_cuda_struct_size(uint32_t n);

#endif
