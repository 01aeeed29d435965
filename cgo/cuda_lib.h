#ifndef HEADRACE_CUDA_LIB_H
#define HEADRACE_CUDA_LIB_H

#include <stddef.h>

#include "cuda.h"

/*
 * The driver's own types, as its ABI has them on 64-bit Linux. Functions that were given other parameters over time are known
 * by their suffix: a driver keeps the old ones.
 */
typedef int hr_result;
typedef int hr_dev;
typedef uint64_t hr_ptr;
typedef struct {
	char bytes[16];
} hr_uuid;
typedef struct {
	char reserved[HR_CUDA_IPC_BYTES];
} hr_ipc;
typedef struct {
	int type, id;
} hr_location;
typedef struct {
	int type;
	int handle_types;
	hr_location location;
	void *win32;
	struct {
		unsigned char compression, gdr_capable;
		unsigned short usage;
		unsigned char reserved[4];
	} flags;
} hr_alloc_prop;
typedef struct {
	hr_location location;
	int flags;
} hr_access;

_Static_assert(sizeof(hr_uuid) == 16, "CUuuid");
_Static_assert(sizeof(hr_ipc) == 64, "CUipcMemHandle, CUipcEventHandle");
_Static_assert(sizeof(hr_alloc_prop) == 32, "CUmemAllocationProp");
_Static_assert(offsetof(hr_alloc_prop, location) == 8 && offsetof(hr_alloc_prop, flags) == 24, "CUmemAllocationProp");
_Static_assert(sizeof(hr_access) == 12, "CUmemAccessDesc");

enum {
	CU_SUCCESS = 0,
	CU_INVALID_VALUE = 1,
	CU_NO_DEVICE = 100,
	CU_STREAM_NON_BLOCKING = 1,
	CU_EVENT_DISABLE_TIMING = 2,
	CU_EVENT_INTERPROCESS = 4,
	CU_IPC_LAZY_PEER_ACCESS = 1,
	CU_HOST_PORTABLE = 1,
	CU_RANGE_DMA_BUF = 1,
	CU_ALLOCATION_PINNED = 1,
	CU_LOCATION_DEVICE = 1,
	CU_ACCESS_READ_WRITE = 3,
	CU_GRANULARITY_RECOMMENDED = 1,
	CU_FLUSH_CURRENT_CTX = 0,
	CU_FLUSH_TO_OWNER = 100,

	CU_ATTR_INTEGRATED = 18,
	CU_ATTR_UNIFIED = 41,
	CU_ATTR_MAJOR = 75,
	CU_ATTR_MINOR = 76,
	CU_ATTR_VMM = 102,
	CU_ATTR_GDR_VMM = 110,
	CU_ATTR_GDR = 116,
	CU_ATTR_GDR_FLUSH = 117,
	CU_ATTR_GDR_ORDERING = 118,
	CU_ATTR_DMABUF = 124,

	CU_PTR_SYNC_MEMOPS = 6,
	CU_PTR_DEVICE = 9,
	CU_PTR_LEGACY_IPC = 10,
	CU_PTR_GDR = 15,
};

struct hr_cuda {
	hr_result (*init)(unsigned int);
	hr_result (*version)(int *);
	hr_result (*error_name)(hr_result, const char **);
	hr_result (*error_text)(hr_result, const char **);
	hr_result (*count)(int *);
	hr_result (*get)(hr_dev *, int);
	hr_result (*name)(char *, int, hr_dev);
	hr_result (*uuid)(hr_uuid *, hr_dev);
	hr_result (*total)(size_t *, hr_dev);
	hr_result (*bus)(char *, int, hr_dev);
	hr_result (*attribute)(int *, int, hr_dev);
	hr_result (*retain)(void **, hr_dev);
	hr_result (*release)(hr_dev);
	hr_result (*push)(void *);
	hr_result (*pop)(void **);
	hr_result (*alloc)(hr_ptr *, size_t);
	hr_result (*free)(hr_ptr);
	hr_result (*fill)(hr_ptr, unsigned char, size_t);
	hr_result (*host_alloc)(void **, size_t, unsigned int);
	hr_result (*host_free)(void *);
	hr_result (*host_register)(void *, size_t, unsigned int);
	hr_result (*host_unregister)(void *);
	hr_result (*range)(hr_ptr *, size_t *, hr_ptr);
	hr_result (*pointer_get)(void *, int, hr_ptr);
	hr_result (*pointer_set)(const void *, int, hr_ptr);
	hr_result (*ipc_get)(hr_ipc *, hr_ptr);
	hr_result (*ipc_open)(hr_ptr *, hr_ipc, unsigned int);
	hr_result (*ipc_close)(hr_ptr);
	hr_result (*stream)(void **, unsigned int);
	hr_result (*stream_free)(void *);
	hr_result (*stream_sync)(void *);
	hr_result (*stream_wait)(void *, void *, unsigned int);
	hr_result (*copy_device)(hr_ptr, hr_ptr, size_t, void *);
	hr_result (*copy_to_device)(hr_ptr, const void *, size_t, void *);
	hr_result (*copy_to_host)(void *, hr_ptr, size_t, void *);
	hr_result (*event)(void **, unsigned int);
	hr_result (*event_free)(void *);
	hr_result (*event_record)(void *, void *);
	hr_result (*event_query)(void *);
	hr_result (*event_sync)(void *);
	hr_result (*event_elapsed)(float *, void *, void *);
	hr_result (*event_ipc_get)(hr_ipc *, void *);
	hr_result (*event_ipc_open)(void **, hr_ipc);
	/* Newer than the driver may be: NULL then. */
	hr_result (*export_range)(void *, hr_ptr, size_t, int, unsigned long long);
	hr_result (*flush)(int, int);
	hr_result (*granularity)(size_t *, const hr_alloc_prop *, int);
	hr_result (*reserve)(hr_ptr *, size_t, size_t, hr_ptr, unsigned long long);
	hr_result (*unreserve)(hr_ptr, size_t);
	hr_result (*create)(uint64_t *, size_t, const hr_alloc_prop *, unsigned long long);
	hr_result (*drop)(uint64_t);
	hr_result (*map)(hr_ptr, size_t, size_t, uint64_t, unsigned long long);
	hr_result (*unmap)(hr_ptr, size_t);
	hr_result (*access)(hr_ptr, size_t, const hr_access *, size_t);
};

#endif
