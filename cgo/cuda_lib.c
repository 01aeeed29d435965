//go:build cgo && linux

#include "cuda_lib.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Go's twins have the same sizes: cuda_types.go. */
_Static_assert(sizeof(struct hr_gpu) == 184, "struct hr_gpu");
_Static_assert(sizeof(struct hr_copy) == 24, "struct hr_copy");
_Static_assert(sizeof(struct hr_cuda_ipc) == 64, "struct hr_cuda_ipc");
_Static_assert(sizeof(struct hr_pointer) == 32, "struct hr_pointer");

uint64_t hr_cuda_struct_size(uint32_t n)
{
	static const uint64_t sizes[] = { sizeof(struct hr_gpu), sizeof(struct hr_copy), sizeof(struct hr_cuda_ipc), sizeof(struct hr_pointer) };
	return n < sizeof(sizes) / sizeof(sizes[0]) ? sizes[n] : 0;
}

struct need {
	const char *name, *older; /* older: of the same shape, for drivers before the name */
	size_t at;
	int optional;
};

#define AT(field) offsetof(struct hr_cuda, field)

static const struct need needs[] = {
	{ "cuInit", 0, AT(init), 0 },
	{ "cuDriverGetVersion", 0, AT(version), 0 },
	{ "cuGetErrorName", 0, AT(error_name), 0 },
	{ "cuGetErrorString", 0, AT(error_text), 0 },
	{ "cuDeviceGetCount", 0, AT(count), 0 },
	{ "cuDeviceGet", 0, AT(get), 0 },
	{ "cuDeviceGetName", 0, AT(name), 0 },
	{ "cuDeviceGetUuid_v2", "cuDeviceGetUuid", AT(uuid), 0 }, /* the newer tells parts of a shared GPU apart */
	{ "cuDeviceTotalMem_v2", 0, AT(total), 0 },
	{ "cuDeviceGetPCIBusId", 0, AT(bus), 0 },
	{ "cuDeviceGetAttribute", 0, AT(attribute), 0 },
	{ "cuDevicePrimaryCtxRetain", 0, AT(retain), 0 },
	{ "cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxRelease", AT(release), 0 },
	{ "cuCtxPushCurrent_v2", 0, AT(push), 0 },
	{ "cuCtxPopCurrent_v2", 0, AT(pop), 0 },
	{ "cuMemAlloc_v2", 0, AT(alloc), 0 },
	{ "cuMemFree_v2", 0, AT(free), 0 },
	{ "cuMemsetD8_v2", 0, AT(fill), 0 },
	{ "cuMemHostAlloc", 0, AT(host_alloc), 0 },
	{ "cuMemFreeHost", 0, AT(host_free), 0 },
	{ "cuMemHostRegister_v2", 0, AT(host_register), 0 },
	{ "cuMemHostUnregister", 0, AT(host_unregister), 0 },
	{ "cuMemGetAddressRange_v2", 0, AT(range), 0 },
	{ "cuPointerGetAttribute", 0, AT(pointer_get), 0 },
	{ "cuPointerSetAttribute", 0, AT(pointer_set), 0 },
	{ "cuIpcGetMemHandle", 0, AT(ipc_get), 0 },
	{ "cuIpcOpenMemHandle_v2", "cuIpcOpenMemHandle", AT(ipc_open), 0 },
	{ "cuIpcCloseMemHandle", 0, AT(ipc_close), 0 },
	{ "cuStreamCreate", 0, AT(stream), 0 },
	{ "cuStreamDestroy_v2", 0, AT(stream_free), 0 },
	{ "cuStreamSynchronize", 0, AT(stream_sync), 0 },
	{ "cuStreamWaitEvent", 0, AT(stream_wait), 0 },
	{ "cuMemcpyDtoDAsync_v2", 0, AT(copy_device), 0 },
	{ "cuMemcpyHtoDAsync_v2", 0, AT(copy_to_device), 0 },
	{ "cuMemcpyDtoHAsync_v2", 0, AT(copy_to_host), 0 },
	{ "cuEventCreate", 0, AT(event), 0 },
	{ "cuEventDestroy_v2", 0, AT(event_free), 0 },
	{ "cuEventRecord", 0, AT(event_record), 0 },
	{ "cuEventQuery", 0, AT(event_query), 0 },
	{ "cuEventSynchronize", 0, AT(event_sync), 0 },
	{ "cuEventElapsedTime", 0, AT(event_elapsed), 0 },
	{ "cuIpcGetEventHandle", 0, AT(event_ipc_get), 0 },
	{ "cuIpcOpenEventHandle", 0, AT(event_ipc_open), 0 },
	{ "cuMemGetHandleForAddressRange", 0, AT(export_range), 1 }, /* CUDA 11.7 */
	{ "cuFlushGPUDirectRDMAWrites", 0, AT(flush), 1 },           /* CUDA 11.3 */
	{ "cuMemGetAllocationGranularity", 0, AT(granularity), 1 },  /* CUDA 10.2, as the rest */
	{ "cuMemAddressReserve", 0, AT(reserve), 1 },
	{ "cuMemAddressFree", 0, AT(unreserve), 1 },
	{ "cuMemCreate", 0, AT(create), 1 },
	{ "cuMemRelease", 0, AT(drop), 1 },
	{ "cuMemMap", 0, AT(map), 1 },
	{ "cuMemUnmap", 0, AT(unmap), 1 },
	{ "cuMemSetAccess", 0, AT(access), 1 },
};

struct hr_cuda *hr_cuda_open(const char *library, int *state, int *result, char detail[HR_CUDA_DETAIL_BYTES])
{
	*result = 0;
	*detail = 0;
	void *h = dlopen(library, RTLD_NOW | RTLD_LOCAL);
	if (!h) {
		const char *why = dlerror();
		snprintf(detail, HR_CUDA_DETAIL_BYTES, "%s", why ? why : "unknown");
		*state = 1;
		return NULL;
	}
	*state = 2;
	struct hr_cuda *d = calloc(1, sizeof(*d));
	if (!d) {
		snprintf(detail, HR_CUDA_DETAIL_BYTES, "out of memory");
		return NULL;
	}
	for (size_t i = 0; i < sizeof(needs) / sizeof(needs[0]); i++) {
		const struct need *n = &needs[i];
		void *p = dlsym(h, n->name);
		if (!p && n->older)
			p = dlsym(h, n->older);
		if (!p && !n->optional) {
			snprintf(detail, HR_CUDA_DETAIL_BYTES, "%s lacks %s", library, n->name);
			free(d);
			return NULL;
		}
		memcpy((char *)d + n->at, &p, sizeof(p));
	}
	*result = d->init(0);
	if (*result == CU_SUCCESS)
		*state = 0;
	else
		hr_cuda_words(d, *result, detail, NULL);
	return d;
}

void hr_cuda_words(struct hr_cuda *d, int result, char name[HR_CUDA_DETAIL_BYTES], char text[HR_CUDA_DETAIL_BYTES])
{
	const char *s = NULL;
	snprintf(name, HR_CUDA_DETAIL_BYTES, "%s", d->error_name(result, &s) == CU_SUCCESS && s ? s : "");
	if (!text)
		return;
	s = NULL;
	snprintf(text, HR_CUDA_DETAIL_BYTES, "%s", d->error_text(result, &s) == CU_SUCCESS && s ? s : "");
}

int hr_cuda_version(struct hr_cuda *d, int *version) { return d->version(version); }

int hr_cuda_count(struct hr_cuda *d, int *n)
{
	*n = 0;
	int r = d->count(n);
	return r == CU_NO_DEVICE ? CU_SUCCESS : r;
}

static int32_t attribute(struct hr_cuda *d, int which, hr_dev dev)
{
	int v = 0;
	return d->attribute(&v, which, dev) == CU_SUCCESS ? v : 0;
}

int hr_cuda_device(struct hr_cuda *d, int ordinal, struct hr_gpu *g)
{
	hr_dev dev;
	size_t total = 0;
	memset(g, 0, sizeof(*g));
	int r = d->get(&dev, ordinal);
	if (!r)
		r = d->name(g->name, sizeof(g->name) - 1, dev);
	if (!r)
		r = d->uuid((hr_uuid *)g->uuid, dev);
	if (!r)
		r = d->total(&total, dev);
	if (!r)
		r = d->bus(g->bus, sizeof(g->bus), dev);
	if (r)
		return r;
	g->memory = total;
	g->ordinal = ordinal;
	g->major = attribute(d, CU_ATTR_MAJOR, dev);
	g->minor = attribute(d, CU_ATTR_MINOR, dev);
	g->dmabuf = d->export_range ? attribute(d, CU_ATTR_DMABUF, dev) : 0;
	g->gdr = attribute(d, CU_ATTR_GDR, dev);
	g->gdr_vmm = attribute(d, CU_ATTR_GDR_VMM, dev);
	g->vmm = attribute(d, CU_ATTR_VMM, dev);
	g->unified = attribute(d, CU_ATTR_UNIFIED, dev);
	g->gdr_ordering = attribute(d, CU_ATTR_GDR_ORDERING, dev);
	g->gdr_flush = attribute(d, CU_ATTR_GDR_FLUSH, dev);
	g->integrated = attribute(d, CU_ATTR_INTEGRATED, dev);
	return CU_SUCCESS;
}

int hr_cuda_retain(struct hr_cuda *d, int ordinal, void **ctx)
{
	hr_dev dev;
	int r = d->get(&dev, ordinal);
	return r ? r : d->retain(ctx, dev);
}

int hr_cuda_release(struct hr_cuda *d, int ordinal)
{
	hr_dev dev;
	int r = d->get(&dev, ordinal);
	return r ? r : d->release(dev);
}
