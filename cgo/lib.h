#ifndef HEADRACE_LIB_H
#define HEADRACE_LIB_H

#include "verbs.h"

#ifdef HR_HAVE_VERBS
#include <infiniband/verbs.h>

/* The header makes macros of these; here they are names in libibverbs. */
#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr

/*
 * What is called by name in libibverbs. Everything else that is used (post, poll, arm, memory windows) is inline in the
 * header and goes through the context's operations.
 */
struct hr_lib {
	int state; /* 0: loaded, else enum hr_state */
	char detail[HR_DETAIL_BYTES];
	struct ibv_device **(*get_device_list)(int *);
	void (*free_device_list)(struct ibv_device **);
	const char *(*get_device_name)(struct ibv_device *);
	struct ibv_context *(*open_device)(struct ibv_device *);
	int (*close_device)(struct ibv_context *);
	int (*query_device)(struct ibv_context *, struct ibv_device_attr *);
	int (*query_port)(struct ibv_context *, uint8_t, struct ibv_port_attr *);
	int (*query_gid)(struct ibv_context *, uint8_t, int, union ibv_gid *);
	int (*query_pkey)(struct ibv_context *, uint8_t, int, __be16 *);
	int (*get_async_event)(struct ibv_context *, struct ibv_async_event *);
	void (*ack_async_event)(struct ibv_async_event *);
	struct ibv_pd *(*alloc_pd)(struct ibv_context *);
	int (*dealloc_pd)(struct ibv_pd *);
	struct ibv_mr *(*reg_mr)(struct ibv_pd *, void *, size_t, int);
	int (*dereg_mr)(struct ibv_mr *);
	struct ibv_comp_channel *(*create_comp_channel)(struct ibv_context *);
	int (*destroy_comp_channel)(struct ibv_comp_channel *);
	int (*get_cq_event)(struct ibv_comp_channel *, struct ibv_cq **, void **);
	void (*ack_cq_events)(struct ibv_cq *, unsigned int);
	struct ibv_cq *(*create_cq)(struct ibv_context *, int, void *, struct ibv_comp_channel *, int);
	int (*destroy_cq)(struct ibv_cq *);
	struct ibv_qp *(*create_qp)(struct ibv_pd *, struct ibv_qp_init_attr *);
	int (*modify_qp)(struct ibv_qp *, struct ibv_qp_attr *, int);
	int (*query_qp)(struct ibv_qp *, struct ibv_qp_attr *, int, struct ibv_qp_init_attr *);
	int (*destroy_qp)(struct ibv_qp *);
	/* Newer than the library may be: NULL then. */
	int (*query_gid_ex)(struct ibv_context *, uint32_t, uint32_t, struct ibv_gid_entry *, uint32_t, size_t);
	struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *, uint64_t, size_t, uint64_t, int, int);
};

/* Opens libibverbs the first time. */
const struct hr_lib *hr_lib(void);

#define HR_CHAIN 64 /* work requests in one call of the provider */

struct hr_qp {
	struct ibv_qp *qp;
	struct ibv_send_wr send[HR_CHAIN];
	struct ibv_sge send_sge[HR_CHAIN];
	struct ibv_recv_wr recv[HR_CHAIN];
	struct ibv_sge recv_sge[HR_CHAIN];
};

/* Links the arenas of a new queue pair. */
void hr_qp_link(struct hr_qp *q);

#endif
#endif
