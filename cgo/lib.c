//go:build cgo && linux

#include "lib.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* Go's twins have the same sizes: types.go. */
_Static_assert(sizeof(struct hr_wr) == 48, "struct hr_wr");
_Static_assert(sizeof(struct hr_recv) == 24, "struct hr_recv");
_Static_assert(sizeof(struct hr_wc) == 40, "struct hr_wc");
_Static_assert(sizeof(struct hr_device_attr) == 136, "struct hr_device_attr");
_Static_assert(sizeof(struct hr_port_attr) == 56, "struct hr_port_attr");
_Static_assert(sizeof(struct hr_gid) == 32, "struct hr_gid");
_Static_assert(sizeof(struct hr_qp_caps) == 24, "struct hr_qp_caps");
_Static_assert(sizeof(struct hr_qp_attr) == 112, "struct hr_qp_attr");
_Static_assert(sizeof(struct hr_keys) == 8, "struct hr_keys");
_Static_assert(sizeof(struct hr_async) == 16, "struct hr_async");
_Static_assert(sizeof(struct hr_handles) == 64, "struct hr_handles");
_Static_assert(sizeof(struct hr_probe) == 4360, "struct hr_probe");

uint64_t hr_struct_size(uint32_t n)
{
	static const uint64_t sizes[] = {
		sizeof(struct hr_wr), sizeof(struct hr_recv), sizeof(struct hr_wc), sizeof(struct hr_device_attr),
		sizeof(struct hr_port_attr), sizeof(struct hr_gid), sizeof(struct hr_qp_caps), sizeof(struct hr_qp_attr),
		sizeof(struct hr_keys), sizeof(struct hr_async), sizeof(struct hr_handles), sizeof(struct hr_probe),
	};
	return n < sizeof(sizes) / sizeof(sizes[0]) ? sizes[n] : 0;
}

#ifndef HR_HAVE_VERBS

void hr_probe_verbs(struct hr_probe *p)
{
	memset(p, 0, sizeof(*p));
	p->state = HR_NO_HEADERS;
}

#else

static struct hr_lib lib;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void *symbol(void *handle, const char *name)
{
	void *p = dlsym(handle, name);
	if (!p && !lib.state) {
		lib.state = HR_FAILED;
		snprintf(lib.detail, sizeof(lib.detail), "libibverbs.so.1 lacks %s", name);
	}
	return p;
}

/* dlsym gives the default version of a symbol, which for all of these is the one that the header describes. */
static void load(void)
{
	void *h = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!h) {
		const char *why = dlerror();
		lib.state = HR_NO_LIBRARY;
		snprintf(lib.detail, sizeof(lib.detail), "%s", why ? why : "unknown");
		return;
	}
	/* Never closed: providers leave threads and handlers behind that point into the library. */
	lib.get_device_list = symbol(h, "ibv_get_device_list");
	lib.free_device_list = symbol(h, "ibv_free_device_list");
	lib.get_device_name = symbol(h, "ibv_get_device_name");
	lib.open_device = symbol(h, "ibv_open_device");
	lib.close_device = symbol(h, "ibv_close_device");
	lib.query_device = symbol(h, "ibv_query_device");
	lib.query_port = symbol(h, "ibv_query_port");
	lib.query_gid = symbol(h, "ibv_query_gid");
	lib.query_pkey = symbol(h, "ibv_query_pkey");
	lib.get_async_event = symbol(h, "ibv_get_async_event");
	lib.ack_async_event = symbol(h, "ibv_ack_async_event");
	lib.alloc_pd = symbol(h, "ibv_alloc_pd");
	lib.dealloc_pd = symbol(h, "ibv_dealloc_pd");
	lib.reg_mr = symbol(h, "ibv_reg_mr");
	lib.dereg_mr = symbol(h, "ibv_dereg_mr");
	lib.create_comp_channel = symbol(h, "ibv_create_comp_channel");
	lib.destroy_comp_channel = symbol(h, "ibv_destroy_comp_channel");
	lib.get_cq_event = symbol(h, "ibv_get_cq_event");
	lib.ack_cq_events = symbol(h, "ibv_ack_cq_events");
	lib.create_cq = symbol(h, "ibv_create_cq");
	lib.destroy_cq = symbol(h, "ibv_destroy_cq");
	lib.create_qp = symbol(h, "ibv_create_qp");
	lib.modify_qp = symbol(h, "ibv_modify_qp");
	lib.query_qp = symbol(h, "ibv_query_qp");
	lib.destroy_qp = symbol(h, "ibv_destroy_qp");
	lib.query_gid_ex = dlsym(h, "_ibv_query_gid_ex");
	lib.reg_dmabuf_mr = dlsym(h, "ibv_reg_dmabuf_mr");
}

const struct hr_lib *hr_lib(void)
{
	pthread_once(&once, load);
	return &lib;
}

void hr_probe_verbs(struct hr_probe *p)
{
	const struct hr_lib *l = hr_lib();
	memset(p, 0, sizeof(*p));
	if (l->state) {
		p->state = l->state;
		memcpy(p->detail, l->detail, sizeof(p->detail));
		return;
	}
	int n = 0;
	errno = 0;
	struct ibv_device **devices = l->get_device_list(&n);
	if (!devices) {
		/* A kernel without RDMA answers ENOSYS: that is an answer, and it is none. */
		p->state = errno == ENOSYS ? HR_LISTED : HR_FAILED;
		snprintf(p->detail, sizeof(p->detail), "ibv_get_device_list: %s", strerror(errno));
		return;
	}
	for (int i = 0; i < n && i < HR_DEVICES_MAX; i++)
		snprintf(p->names[p->devices++], HR_NAME_BYTES, "%s", l->get_device_name(devices[i]));
	l->free_device_list(devices);
	p->state = HR_LISTED;
}

#endif
