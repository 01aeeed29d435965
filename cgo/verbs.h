#ifndef HEADRACE_VERBS_H
#define HEADRACE_VERBS_H

/*
 * What crosses between Go and C. Structs are flat, free of pointers and of fixed width, so that a Go slice of them may be
 * handed over as it is; each has a Go twin in types.go, and both sides assert that they agree. Functions that can fail
 * return an errno, 0 for none. Objects are pointers into C memory that Go never looks into.
 */

#include <stdint.h>

#if defined(__has_include) && !defined(HEADRACE_NO_VERBS) /* the latter to try the build without */
#if __has_include(<infiniband/verbs.h>)
#define HR_HAVE_VERBS 1
#endif
#endif

enum hr_state { HR_NO_HEADERS = 1, HR_NO_LIBRARY = 2, HR_FAILED = 3, HR_LISTED = 4 };

#define HR_DEVICES_MAX 64
#define HR_NAME_BYTES 64
#define HR_DETAIL_BYTES 256

struct hr_probe {
	int32_t state;
	int32_t devices;
	char names[HR_DEVICES_MAX][HR_NAME_BYTES];
	char detail[HR_DETAIL_BYTES];
};

/* One work request. BIND_MW has a call of its own; LOCAL_INV takes the key in rkey. */
struct hr_wr {
	uint64_t local;
	uint64_t remote;
	uint64_t id;
	uint32_t len;
	uint32_t lkey;
	uint32_t rkey;
	uint32_t imm; /* host order */
	uint32_t op;
	uint32_t flags;
};

enum hr_op { HR_OP_WRITE, HR_OP_WRITE_IMM, HR_OP_READ, HR_OP_SEND, HR_OP_SEND_IMM, HR_OP_LOCAL_INV, HR_OPS };
enum hr_flag { HR_SIGNALED = 1, HR_FENCE = 2, HR_INLINE = 4, HR_SOLICITED = 8 };

struct hr_recv {
	uint64_t local;
	uint64_t id;
	uint32_t len;
	uint32_t lkey;
};

/* One completion. status is enum ibv_wc_status, op is enum hr_wc_op and holds only where status is 0. */
struct hr_wc {
	uint64_t id;
	uint32_t status;
	uint32_t op;
	uint32_t bytes;
	uint32_t imm; /* host order */
	uint32_t qpn;
	uint32_t has_imm;
	uint32_t vendor;
	uint32_t reserved;
};

enum hr_wc_op { HR_WC_OTHER, HR_WC_WRITE, HR_WC_READ, HR_WC_SEND, HR_WC_RECV, HR_WC_RECV_WRITE, HR_WC_BIND_MW, HR_WC_LOCAL_INV };

struct hr_device_attr {
	uint64_t node_guid; /* as 16 hex digits would read */
	uint64_t max_mr_size;
	uint32_t max_qp, max_qp_wr, max_sge, max_cq, max_cqe, max_mr, max_pd, max_mw;
	uint32_t max_rd_atom, max_init_rd_atom, cap_flags, ports, vendor_id, vendor_part;
	char firmware[HR_NAME_BYTES];
};

struct hr_port_attr {
	uint32_t state, phys_state, max_mtu, active_mtu; /* MTUs in bytes */
	uint32_t link_layer, width, speed, lid, sm_lid, lmc, gids, pkeys, max_msg, reserved;
};

struct hr_gid {
	uint8_t gid[16];
	uint32_t index, port, type, ifindex;
};

struct hr_qp_caps {
	uint32_t send_wr, recv_wr, send_sge, recv_sge, inline_bytes, reserved;
};

/* What ibv_modify_qp takes; mask is enum ibv_qp_attr_mask. */
struct hr_qp_attr {
	uint32_t mask, state, pkey_index, port, access, path_mtu, dest_qpn, rq_psn, sq_psn;
	uint32_t max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, timeout, retry_cnt, rnr_retry;
	uint32_t is_global, dlid, sl, src_path_bits, flow_label, sgid_index, hop_limit, traffic_class, reserved;
	uint8_t dgid[16];
};

struct hr_keys {
	uint32_t lkey, rkey;
};

struct hr_async {
	uint32_t type, port, qpn, reserved;
};

/* Objects that exist, for leak checks. */
struct hr_handles {
	int64_t devices, pds, mrs, channels, cqs, qps, mws, reserved;
};

struct hr_qp; /* a queue pair and the memory that its chains are built in */

void hr_probe_verbs(struct hr_probe *p);
void hr_handles(struct hr_handles *h);

int hr_open(const char *name, void **dev);
int hr_close(void *dev);
int hr_query_device(void *dev, struct hr_device_attr *a);
int hr_query_port(void *dev, uint32_t port, struct hr_port_attr *a);
int hr_query_gid(void *dev, uint32_t port, uint32_t index, struct hr_gid *g);
int hr_query_pkey(void *dev, uint32_t port, uint32_t index, uint32_t *pkey);
int hr_async_fd(void *dev);
int hr_async_event(void *dev, struct hr_async *e);

int hr_alloc_pd(void *dev, void **pd);
int hr_dealloc_pd(void *pd);
int hr_reg_mr(void *pd, uint64_t addr, uint64_t len, uint32_t access, void **mr, struct hr_keys *keys);
int hr_reg_dmabuf_mr(void *pd, uint64_t offset, uint64_t len, uint64_t iova, int fd, uint32_t access, void **mr, struct hr_keys *keys);
int hr_dereg_mr(void *mr);
int hr_alloc_mw(void *pd, void **mw, uint32_t *rkey);
int hr_dealloc_mw(void *mw);

int hr_create_channel(void *dev, void **channel, int *fd);
int hr_destroy_channel(void *channel);
int hr_channel_event(void *channel); /* takes and acknowledges one event; EAGAIN where there is none */
int hr_create_cq(void *dev, uint32_t entries, void *channel, uint32_t vector, void **cq);
int hr_destroy_cq(void *cq);

int hr_create_qp(void *pd, void *send_cq, void *recv_cq, struct hr_qp_caps *caps, struct hr_qp **qp, uint32_t *qpn);
int hr_modify_qp(struct hr_qp *qp, const struct hr_qp_attr *a);
int hr_query_qp(struct hr_qp *qp, uint32_t *state);
int hr_destroy_qp(struct hr_qp *qp);

/*
 * The data path. These are exported and never inlined: uprobes attach to them. One caller at a time for each queue pair and
 * direction, and for each completion queue. The post calls return errno << 32 | number posted.
 */
uint64_t hr_post_send(struct hr_qp *qp, const struct hr_wr *wrs, uint32_t n);
uint64_t hr_post_recv(struct hr_qp *qp, const struct hr_recv *wrs, uint32_t n);
uint64_t hr_post_bind(struct hr_qp *qp, void *mw, void *mr, uint32_t rkey, uint64_t addr, uint64_t len, uint32_t access, uint64_t id);
int hr_poll(void *cq, struct hr_wc *out, uint32_t n);
void hr_post_sampled(struct hr_qp *q, const struct hr_wr *w); /* see Entries */
void hr_poll_sampled(void *cq, const struct hr_wc *w);
int hr_arm(void *cq);

/*
 * A provider without hardware. With depth 0 it takes everything and does nothing: what a post costs. With a depth it is a
 * send queue of that depth: what does not fit is ENOMEM, and polling its completion queue completes what is there.
 */
int hr_null_create(uint32_t depth, struct hr_qp **qp, void **cq);
void hr_null_destroy(struct hr_qp *qp);
/* A plain C loop that posts n writes of len bytes, in chains or one by one: nanoseconds for all rounds. */
uint64_t hr_null_loop(struct hr_qp *qp, const struct hr_wr *wrs, uint32_t n, uint32_t rounds, uint32_t chained);

/* sizeof of the n-th struct above, as the C compiler sees it; 0 beyond the last. */
uint64_t hr_struct_size(uint32_t n);

#endif
