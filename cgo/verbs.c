//go:build cgo && linux

#include "verbs.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#if defined(__has_include)
#if __has_include(<infiniband/verbs.h>)
#define HR_HAVE_VERBS 1
#include <infiniband/verbs.h>
#endif
#endif

uint64_t hr_probe_size(void) { return sizeof(struct hr_probe); }

#ifndef HR_HAVE_VERBS

void hr_probe_verbs(struct hr_probe *p)
{
	memset(p, 0, sizeof(*p));
	p->state = HR_NO_HEADERS;
}

#else

typedef struct ibv_device **(*list_fn)(int *);
typedef void (*free_fn)(struct ibv_device **);
typedef const char *(*name_fn)(struct ibv_device *);

static void list(struct hr_probe *p, list_fn list_devices, free_fn free_list, name_fn name_of)
{
	int n = 0;
	struct ibv_device **devices = list_devices(&n);
	if (!devices) {
		/* A kernel without RDMA answers ENOSYS: that is an answer, and it is none. */
		p->state = errno == ENOSYS ? HR_LISTED : HR_FAILED;
		snprintf(p->detail, sizeof(p->detail), "ibv_get_device_list: %s", strerror(errno));
		return;
	}
	for (int i = 0; i < n && i < HR_DEVICES_MAX; i++)
		snprintf(p->names[p->devices++], HR_NAME_BYTES, "%s", name_of(devices[i]));
	free_list(devices);
	p->state = HR_LISTED;
}

void hr_probe_verbs(struct hr_probe *p)
{
	memset(p, 0, sizeof(*p));
	void *lib = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!lib) {
		const char *why = dlerror();
		p->state = HR_NO_LIBRARY;
		snprintf(p->detail, sizeof(p->detail), "%s", why ? why : "unknown");
		return;
	}
	/* Never closed: providers leave threads and handlers behind that point into the library. */
	list_fn list_devices = (list_fn)dlsym(lib, "ibv_get_device_list");
	free_fn free_list = (free_fn)dlsym(lib, "ibv_free_device_list");
	name_fn name_of = (name_fn)dlsym(lib, "ibv_get_device_name");
	if (!list_devices || !free_list || !name_of) {
		p->state = HR_FAILED;
		snprintf(p->detail, sizeof(p->detail), "libibverbs.so.1 lacks ibv_get_device_list");
		return;
	}
	errno = 0;
	list(p, list_devices, free_list, name_of);
}

#endif
