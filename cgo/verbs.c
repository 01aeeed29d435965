//go:build cgo && linux

#include "lib.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

static struct hr_handles live;

void hr_handles(struct hr_handles *h)
{
	const int64_t *from = (const int64_t *)&live;
	int64_t *to = (int64_t *)h;
	for (size_t i = 0; i < sizeof(live) / sizeof(int64_t); i++)
		to[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
}

#ifdef HR_HAVE_VERBS

static void count(int64_t *n, int64_t by) { __atomic_add_fetch(n, by, __ATOMIC_RELAXED); }

/* Some providers fail without an errno, some return it negated. */
static int failure(int rc) { return rc > 0 ? rc : rc < -1 ? -rc : errno ? errno : EIO; }

static int undo(int rc, int64_t *n)
{
	if (rc)
		return failure(rc);
	count(n, -1);
	return 0;
}

static int made(void *object, void **out, int64_t *n)
{
	*out = object;
	if (!object)
		return failure(0);
	count(n, 1);
	return 0;
}

int hr_open(const char *name, void **dev)
{
	const struct hr_lib *l = hr_lib();
	if (l->state)
		return ENOSYS;
	int n = 0, rc = ENODEV;
	errno = 0;
	struct ibv_device **devices = l->get_device_list(&n);
	if (!devices)
		return failure(0);
	for (int i = 0; i < n; i++) {
		if (strcmp(l->get_device_name(devices[i]), name))
			continue;
		errno = 0;
		rc = made(l->open_device(devices[i]), dev, &live.devices);
		break;
	}
	l->free_device_list(devices);
	return rc;
}

int hr_close(void *dev)
{
	errno = 0;
	return undo(hr_lib()->close_device(dev), &live.devices);
}

int hr_query_device(void *dev, struct hr_device_attr *a)
{
	struct ibv_device_attr d;
	memset(&d, 0, sizeof(d));
	memset(a, 0, sizeof(*a));
	errno = 0;
	int rc = hr_lib()->query_device(dev, &d);
	if (rc)
		return failure(rc);
	a->node_guid = be64toh(d.node_guid);
	a->max_mr_size = d.max_mr_size;
	a->max_qp = d.max_qp, a->max_qp_wr = d.max_qp_wr, a->max_sge = d.max_sge, a->max_cq = d.max_cq;
	a->max_cqe = d.max_cqe, a->max_mr = d.max_mr, a->max_pd = d.max_pd, a->max_mw = d.max_mw;
	a->max_rd_atom = d.max_qp_rd_atom, a->max_init_rd_atom = d.max_qp_init_rd_atom;
	a->cap_flags = d.device_cap_flags, a->ports = d.phys_port_cnt;
	a->vendor_id = d.vendor_id, a->vendor_part = d.vendor_part_id;
	memcpy(a->firmware, d.fw_ver, sizeof(a->firmware) - 1);
	return 0;
}

static uint32_t mtu_bytes(enum ibv_mtu m) { return m >= IBV_MTU_256 && m <= IBV_MTU_4096 ? 128u << m : 0; }

int hr_query_port(void *dev, uint32_t port, struct hr_port_attr *a)
{
	/* The function fills in the older, shorter struct; what follows in the newer one stays zero. */
	struct ibv_port_attr p;
	memset(&p, 0, sizeof(p));
	memset(a, 0, sizeof(*a));
	errno = 0;
	int rc = hr_lib()->query_port(dev, (uint8_t)port, &p);
	if (rc)
		return failure(rc);
	a->state = p.state, a->phys_state = p.phys_state;
	a->max_mtu = mtu_bytes(p.max_mtu), a->active_mtu = mtu_bytes(p.active_mtu);
	a->link_layer = p.link_layer, a->width = p.active_width, a->speed = p.active_speed;
	a->lid = p.lid, a->sm_lid = p.sm_lid, a->lmc = p.lmc, a->gids = p.gid_tbl_len, a->pkeys = p.pkey_tbl_len;
	a->max_msg = p.max_msg_sz;
	return 0;
}

int hr_query_gid(void *dev, uint32_t port, uint32_t index, struct hr_gid *g)
{
	struct ibv_gid_entry e;
	memset(&e, 0, sizeof(e));
	memset(g, 0, sizeof(*g));
	if (!hr_lib()->query_gid_ex)
		return EOPNOTSUPP;
	errno = 0;
	int rc = hr_lib()->query_gid_ex(dev, port, index, &e, 0, sizeof(e));
	if (rc)
		return failure(rc);
	memcpy(g->gid, e.gid.raw, sizeof(g->gid));
	g->index = e.gid_index, g->port = e.port_num, g->type = e.gid_type, g->ifindex = e.ndev_ifindex;
	return 0;
}

int hr_query_pkey(void *dev, uint32_t port, uint32_t index, uint32_t *pkey)
{
	__be16 k = 0;
	errno = 0;
	int rc = hr_lib()->query_pkey(dev, (uint8_t)port, (int)index, &k);
	*pkey = be16toh(k);
	return rc ? failure(rc) : 0;
}

static int nonblocking(int fd)
{
	int flags = fcntl(fd, F_GETFL);
	return flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ? errno : 0;
}

int hr_async_fd(void *dev)
{
	struct ibv_context *ctx = dev;
	return nonblocking(ctx->async_fd) ? -1 : ctx->async_fd;
}

int hr_async_event(void *dev, struct hr_async *out)
{
	struct ibv_async_event e;
	memset(out, 0, sizeof(*out));
	errno = 0;
	if (hr_lib()->get_async_event(dev, &e))
		return failure(0);
	out->type = e.event_type;
	switch (e.event_type) {
	case IBV_EVENT_PORT_ACTIVE:
	case IBV_EVENT_PORT_ERR:
	case IBV_EVENT_LID_CHANGE:
	case IBV_EVENT_PKEY_CHANGE:
	case IBV_EVENT_GID_CHANGE:
	case IBV_EVENT_SM_CHANGE:
	case IBV_EVENT_CLIENT_REREGISTER:
		out->port = e.element.port_num;
		break;
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_PATH_MIG:
	case IBV_EVENT_PATH_MIG_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		out->qpn = e.element.qp->qp_num;
		break;
	default:
		break;
	}
	hr_lib()->ack_async_event(&e);
	return 0;
}

int hr_alloc_pd(void *dev, void **pd)
{
	errno = 0;
	return made(hr_lib()->alloc_pd(dev), pd, &live.pds);
}

int hr_dealloc_pd(void *pd)
{
	errno = 0;
	return undo(hr_lib()->dealloc_pd(pd), &live.pds);
}

static int registered(struct ibv_mr *m, void **mr, struct hr_keys *keys)
{
	int rc = made(m, mr, &live.mrs);
	if (!rc)
		keys->lkey = m->lkey, keys->rkey = m->rkey;
	return rc;
}

int hr_reg_mr(void *pd, uint64_t addr, uint64_t len, uint32_t access, void **mr, struct hr_keys *keys)
{
	errno = 0;
	return registered(hr_lib()->reg_mr(pd, (void *)(uintptr_t)addr, len, (int)access), mr, keys);
}

int hr_reg_dmabuf_mr(void *pd, uint64_t offset, uint64_t len, uint64_t iova, int fd, uint32_t access, void **mr, struct hr_keys *keys)
{
	if (!hr_lib()->reg_dmabuf_mr)
		return EOPNOTSUPP;
	errno = 0;
	return registered(hr_lib()->reg_dmabuf_mr(pd, offset, len, iova, fd, (int)access), mr, keys);
}

int hr_dereg_mr(void *mr)
{
	errno = 0;
	return undo(hr_lib()->dereg_mr(mr), &live.mrs);
}

int hr_alloc_mw(void *pd, void **mw, uint32_t *rkey)
{
	errno = 0;
	struct ibv_mw *w = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	int rc = made(w, mw, &live.mws);
	if (!rc)
		*rkey = w->rkey;
	return rc;
}

int hr_dealloc_mw(void *mw)
{
	errno = 0;
	return undo(ibv_dealloc_mw(mw), &live.mws);
}

int hr_create_channel(void *dev, void **channel, int *fd)
{
	errno = 0;
	struct ibv_comp_channel *c = hr_lib()->create_comp_channel(dev);
	int rc = made(c, channel, &live.channels);
	if (rc)
		return rc;
	*fd = c->fd;
	rc = nonblocking(c->fd);
	if (rc)
		hr_destroy_channel(c);
	return rc;
}

int hr_destroy_channel(void *channel)
{
	errno = 0;
	return undo(hr_lib()->destroy_comp_channel(channel), &live.channels);
}

int hr_channel_event(void *channel)
{
	struct ibv_cq *cq;
	void *context;
	errno = 0;
	if (hr_lib()->get_cq_event(channel, &cq, &context))
		return failure(0);
	/* At once: destroying a completion queue waits for its unacknowledged events. */
	hr_lib()->ack_cq_events(cq, 1);
	return 0;
}

int hr_create_cq(void *dev, uint32_t entries, void *channel, uint32_t vector, void **cq)
{
	errno = 0;
	return made(hr_lib()->create_cq(dev, (int)entries, NULL, channel, (int)vector), cq, &live.cqs);
}

int hr_destroy_cq(void *cq)
{
	errno = 0;
	return undo(hr_lib()->destroy_cq(cq), &live.cqs);
}

int hr_create_qp(void *pd, void *send_cq, void *recv_cq, struct hr_qp_caps *caps, struct hr_qp **qp, uint32_t *qpn)
{
	struct ibv_qp_init_attr a;
	memset(&a, 0, sizeof(a));
	a.send_cq = send_cq, a.recv_cq = recv_cq, a.qp_type = IBV_QPT_RC;
	a.cap.max_send_wr = caps->send_wr, a.cap.max_recv_wr = caps->recv_wr;
	a.cap.max_send_sge = caps->send_sge, a.cap.max_recv_sge = caps->recv_sge, a.cap.max_inline_data = caps->inline_bytes;
	struct hr_qp *q = calloc(1, sizeof(*q));
	*qp = NULL;
	if (!q)
		return ENOMEM;
	errno = 0;
	int rc = made(hr_lib()->create_qp(pd, &a), (void **)&q->qp, &live.qps);
	if (rc) {
		free(q);
		return rc;
	}
	caps->send_wr = a.cap.max_send_wr, caps->recv_wr = a.cap.max_recv_wr;
	caps->send_sge = a.cap.max_send_sge, caps->recv_sge = a.cap.max_recv_sge, caps->inline_bytes = a.cap.max_inline_data;
	hr_qp_link(q);
	*qp = q;
	*qpn = q->qp->qp_num;
	return 0;
}

int hr_modify_qp(struct hr_qp *q, const struct hr_qp_attr *a)
{
	struct ibv_qp_attr m;
	memset(&m, 0, sizeof(m));
	m.qp_state = a->state;
	m.pkey_index = (uint16_t)a->pkey_index, m.port_num = (uint8_t)a->port, m.qp_access_flags = a->access;
	m.path_mtu = a->path_mtu ? (enum ibv_mtu)(__builtin_ctz(a->path_mtu) - 7) : 0;
	m.dest_qp_num = a->dest_qpn, m.rq_psn = a->rq_psn, m.sq_psn = a->sq_psn;
	m.max_rd_atomic = (uint8_t)a->max_rd_atomic, m.max_dest_rd_atomic = (uint8_t)a->max_dest_rd_atomic;
	m.min_rnr_timer = (uint8_t)a->min_rnr_timer, m.timeout = (uint8_t)a->timeout;
	m.retry_cnt = (uint8_t)a->retry_cnt, m.rnr_retry = (uint8_t)a->rnr_retry;
	m.ah_attr.is_global = (uint8_t)a->is_global, m.ah_attr.dlid = (uint16_t)a->dlid, m.ah_attr.sl = (uint8_t)a->sl;
	m.ah_attr.src_path_bits = (uint8_t)a->src_path_bits, m.ah_attr.port_num = (uint8_t)a->port;
	memcpy(m.ah_attr.grh.dgid.raw, a->dgid, sizeof(a->dgid));
	m.ah_attr.grh.flow_label = a->flow_label, m.ah_attr.grh.sgid_index = (uint8_t)a->sgid_index;
	m.ah_attr.grh.hop_limit = (uint8_t)a->hop_limit, m.ah_attr.grh.traffic_class = (uint8_t)a->traffic_class;
	errno = 0;
	int rc = hr_lib()->modify_qp(q->qp, &m, (int)a->mask);
	return rc ? failure(rc) : 0;
}

int hr_query_qp(struct hr_qp *q, uint32_t *state)
{
	struct ibv_qp_attr a;
	struct ibv_qp_init_attr init;
	memset(&a, 0, sizeof(a));
	errno = 0;
	int rc = hr_lib()->query_qp(q->qp, &a, IBV_QP_STATE, &init);
	*state = a.qp_state;
	return rc ? failure(rc) : 0;
}

int hr_destroy_qp(struct hr_qp *q)
{
	errno = 0;
	int rc = undo(hr_lib()->destroy_qp(q->qp), &live.qps);
	if (!rc)
		free(q);
	return rc;
}

#else /* without headers: the same entry points, and nothing behind them */

#define NONE { return ENOSYS; }
int hr_open(const char *name, void **dev) NONE
int hr_close(void *dev) NONE
int hr_query_device(void *dev, struct hr_device_attr *a) NONE
int hr_query_port(void *dev, uint32_t port, struct hr_port_attr *a) NONE
int hr_query_gid(void *dev, uint32_t port, uint32_t index, struct hr_gid *g) NONE
int hr_query_pkey(void *dev, uint32_t port, uint32_t index, uint32_t *pkey) NONE
int hr_async_fd(void *dev) { return -1; }
int hr_async_event(void *dev, struct hr_async *e) NONE
int hr_alloc_pd(void *dev, void **pd) NONE
int hr_dealloc_pd(void *pd) NONE
int hr_reg_mr(void *pd, uint64_t addr, uint64_t len, uint32_t access, void **mr, struct hr_keys *keys) NONE
int hr_reg_dmabuf_mr(void *pd, uint64_t offset, uint64_t len, uint64_t iova, int fd, uint32_t access, void **mr, struct hr_keys *keys) NONE
int hr_dereg_mr(void *mr) NONE
int hr_alloc_mw(void *pd, void **mw, uint32_t *rkey) NONE
int hr_dealloc_mw(void *mw) NONE
int hr_create_channel(void *dev, void **channel, int *fd) NONE
int hr_destroy_channel(void *channel) NONE
int hr_channel_event(void *channel) NONE
int hr_create_cq(void *dev, uint32_t entries, void *channel, uint32_t vector, void **cq) NONE
int hr_destroy_cq(void *cq) NONE
int hr_create_qp(void *pd, void *send_cq, void *recv_cq, struct hr_qp_caps *caps, struct hr_qp **qp, uint32_t *qpn) NONE
int hr_modify_qp(struct hr_qp *qp, const struct hr_qp_attr *a) NONE
int hr_query_qp(struct hr_qp *qp, uint32_t *state) NONE
int hr_destroy_qp(struct hr_qp *qp) NONE

#endif
