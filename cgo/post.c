//go:build cgo && linux

#include "lib.h"

#include <errno.h>
#include <string.h>

/* In the binary under these names whatever the optimiser thinks: uprobes attach here. */
#define HR_ENTRY __attribute__((noinline, visibility("default")))

#ifdef HR_HAVE_VERBS

static const enum ibv_wr_opcode opcodes[HR_OPS] = {
	[HR_OP_WRITE] = IBV_WR_RDMA_WRITE,     [HR_OP_WRITE_IMM] = IBV_WR_RDMA_WRITE_WITH_IMM,
	[HR_OP_READ] = IBV_WR_RDMA_READ,       [HR_OP_SEND] = IBV_WR_SEND,
	[HR_OP_SEND_IMM] = IBV_WR_SEND_WITH_IMM, [HR_OP_LOCAL_INV] = IBV_WR_LOCAL_INV,
};

static const unsigned int send_flags[16] = {
#define F(n) [n] = ((n) & HR_SIGNALED ? IBV_SEND_SIGNALED : 0) | ((n) & HR_FENCE ? IBV_SEND_FENCE : 0) | \
		   ((n) & HR_INLINE ? IBV_SEND_INLINE : 0) | ((n) & HR_SOLICITED ? IBV_SEND_SOLICITED : 0)
	F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7), F(8), F(9), F(10), F(11), F(12), F(13), F(14), F(15),
#undef F
};

void hr_qp_link(struct hr_qp *q)
{
	for (int i = 0; i < HR_CHAIN; i++) {
		q->send[i].sg_list = &q->send_sge[i];
		q->send[i].next = i + 1 < HR_CHAIN ? &q->send[i + 1] : NULL;
		q->recv[i].sg_list = &q->recv_sge[i];
		q->recv[i].next = i + 1 < HR_CHAIN ? &q->recv[i + 1] : NULL;
	}
}

static uint64_t result(int rc, uint64_t posted)
{
	uint64_t err = rc > 0 ? rc : rc < -1 ? -rc : errno ? errno : EIO;
	return err << 32 | posted;
}

static int fill(struct ibv_send_wr *s, const struct hr_wr *w)
{
	if (w->op >= HR_OPS || w->flags > 15)
		return EINVAL;
	s->wr_id = w->id;
	s->sg_list->addr = w->local;
	s->sg_list->length = w->len;
	s->sg_list->lkey = w->lkey;
	s->num_sge = w->len != 0;
	s->opcode = opcodes[w->op];
	s->send_flags = send_flags[w->flags];
	if (w->op == HR_OP_LOCAL_INV)
		s->invalidate_rkey = w->rkey;
	else
		s->imm_data = htobe32(w->imm);
	s->wr.rdma.remote_addr = w->remote;
	s->wr.rdma.rkey = w->rkey;
	return 0;
}

/*
 * For probes from outside: one in 32 of the requests that end a call of hr_post_send and say when they are done, and the
 * completion of the same. The id says which, at both ends. A probe costs a trap, which is dearer than posting 64 requests.
 */
HR_ENTRY void hr_post_sampled(struct hr_qp *q, const struct hr_wr *w) { __asm__ volatile("" : : "r"(q), "r"(w) : "memory"); }
HR_ENTRY void hr_poll_sampled(void *cq, const struct hr_wc *w) { __asm__ volatile("" : : "r"(cq), "r"(w) : "memory"); }

static int sampled(uint64_t id) { return id * 0x9e3779b97f4a7c15u >> 59 == 0; }

HR_ENTRY uint64_t hr_post_send(struct hr_qp *q, const struct hr_wr *w, uint32_t n)
{
	uint32_t posted = 0;
	if (n && sampled(w[n - 1].id) && w[n - 1].flags & HR_SIGNALED)
		hr_post_sampled(q, &w[n - 1]);
	while (posted < n) {
		uint32_t k = n - posted < HR_CHAIN ? n - posted : HR_CHAIN;
		for (uint32_t i = 0; i < k; i++)
			if (fill(&q->send[i], &w[posted + i]))
				return (uint64_t)EINVAL << 32 | posted;
		struct ibv_send_wr *bad = NULL, *next = q->send[k - 1].next;
		q->send[k - 1].next = NULL;
		errno = 0;
		int rc = ibv_post_send(q->qp, q->send, &bad);
		q->send[k - 1].next = next;
		if (rc) /* what stands before the bad one was posted */
			return result(rc, posted + (bad >= q->send && bad < q->send + k ? (uint32_t)(bad - q->send) : 0));
		posted += k;
	}
	return posted;
}

HR_ENTRY uint64_t hr_post_recv(struct hr_qp *q, const struct hr_recv *w, uint32_t n)
{
	uint32_t posted = 0;
	while (posted < n) {
		uint32_t k = n - posted < HR_CHAIN ? n - posted : HR_CHAIN;
		for (uint32_t i = 0; i < k; i++) {
			struct ibv_recv_wr *r = &q->recv[i];
			r->wr_id = w[posted + i].id;
			r->sg_list->addr = w[posted + i].local;
			r->sg_list->length = w[posted + i].len;
			r->sg_list->lkey = w[posted + i].lkey;
			r->num_sge = w[posted + i].len != 0;
		}
		struct ibv_recv_wr *bad = NULL, *next = q->recv[k - 1].next;
		q->recv[k - 1].next = NULL;
		errno = 0;
		int rc = ibv_post_recv(q->qp, q->recv, &bad);
		q->recv[k - 1].next = next;
		if (rc)
			return result(rc, posted + (bad >= q->recv && bad < q->recv + k ? (uint32_t)(bad - q->recv) : 0));
		posted += k;
	}
	return posted;
}

HR_ENTRY uint64_t hr_post_bind(struct hr_qp *q, void *mw, void *mr, uint32_t rkey, uint64_t addr, uint64_t len, uint32_t access, uint64_t id)
{
	struct ibv_send_wr w, *bad = NULL;
	memset(&w, 0, sizeof(w));
	w.wr_id = id, w.opcode = IBV_WR_BIND_MW, w.send_flags = IBV_SEND_SIGNALED;
	w.bind_mw.mw = mw, w.bind_mw.rkey = rkey;
	w.bind_mw.bind_info.mr = mr, w.bind_mw.bind_info.addr = addr, w.bind_mw.bind_info.length = len;
	w.bind_mw.bind_info.mw_access_flags = access;
	errno = 0;
	int rc = ibv_post_send(q->qp, &w, &bad);
	if (rc)
		return result(rc, 0);
	((struct ibv_mw *)mw)->rkey = rkey; /* providers name the window by it in the next bind, and leave it to us */
	return 1;
}

static uint32_t completed(enum ibv_wc_opcode op)
{
	switch (op) {
	case IBV_WC_RDMA_WRITE: return HR_WC_WRITE;
	case IBV_WC_RDMA_READ: return HR_WC_READ;
	case IBV_WC_SEND: return HR_WC_SEND;
	case IBV_WC_RECV: return HR_WC_RECV;
	case IBV_WC_RECV_RDMA_WITH_IMM: return HR_WC_RECV_WRITE;
	case IBV_WC_BIND_MW: return HR_WC_BIND_MW;
	case IBV_WC_LOCAL_INV: return HR_WC_LOCAL_INV;
	default: return HR_WC_OTHER;
	}
}

HR_ENTRY int hr_poll(void *cq, struct hr_wc *out, uint32_t n)
{
	struct ibv_wc wc[32];
	uint32_t got = 0;
	while (got < n) {
		int want = n - got < 32 ? (int)(n - got) : 32;
		int k = ibv_poll_cq(cq, want, wc);
		if (k < 0)
			return got ? (int)got : -EIO;
		for (int i = 0; i < k; i++) {
			struct hr_wc *o = &out[got + i];
			o->id = wc[i].wr_id;
			o->status = wc[i].status;
			o->op = wc[i].status == IBV_WC_SUCCESS ? completed(wc[i].opcode) : HR_WC_OTHER;
			o->bytes = wc[i].byte_len;
			o->has_imm = wc[i].status == IBV_WC_SUCCESS && (wc[i].wc_flags & IBV_WC_WITH_IMM);
			o->imm = o->has_imm ? be32toh(wc[i].imm_data) : 0;
			o->qpn = wc[i].qp_num;
			o->vendor = wc[i].vendor_err;
			o->reserved = 0;
			if (sampled(o->id))
				hr_poll_sampled(cq, o);
		}
		got += (uint32_t)k;
		if (k < want)
			break;
	}
	return (int)got;
}

HR_ENTRY int hr_arm(void *cq)
{
	errno = 0;
	int rc = ibv_req_notify_cq(cq, 0);
	return rc ? (int)(result(rc, 0) >> 32) : 0;
}

#else

HR_ENTRY uint64_t hr_post_send(struct hr_qp *q, const struct hr_wr *w, uint32_t n) { return (uint64_t)ENOSYS << 32; }
HR_ENTRY uint64_t hr_post_recv(struct hr_qp *q, const struct hr_recv *w, uint32_t n) { return (uint64_t)ENOSYS << 32; }
HR_ENTRY uint64_t hr_post_bind(struct hr_qp *q, void *mw, void *mr, uint32_t rkey, uint64_t addr, uint64_t len, uint32_t access, uint64_t id) { return (uint64_t)ENOSYS << 32; }
HR_ENTRY void hr_post_sampled(struct hr_qp *q, const struct hr_wr *w) { }
HR_ENTRY void hr_poll_sampled(void *cq, const struct hr_wc *w) { }
HR_ENTRY int hr_poll(void *cq, struct hr_wc *out, uint32_t n) { return -ENOSYS; }
HR_ENTRY int hr_arm(void *cq) { return ENOSYS; }

#endif
