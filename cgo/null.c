//go:build cgo && linux

#include "lib.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

#ifdef HR_HAVE_VERBS

/* A queue pair, its completion queue and context of our own making: enough for what the header's inline functions touch. */
struct null_queue {
	struct hr_qp q; /* first: freed by its address */
	struct ibv_context ctx;
	struct ibv_qp qp;
	struct ibv_cq cq;
	uint32_t depth, head, tail;
	struct ibv_wc ring[];
};

static int post_nothing(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	return 0;
}

static struct null_queue *of_qp(struct ibv_qp *qp) { return qp->qp_context; }

static int post_ring(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct null_queue *n = of_qp(qp);
	for (; wr; wr = wr->next) {
		if (n->head - n->tail == n->depth) {
			*bad = wr;
			return ENOMEM;
		}
		struct ibv_wc *wc = &n->ring[n->head++ % n->depth];
		wc->wr_id = wr->wr_id;
		wc->status = IBV_WC_SUCCESS;
		wc->opcode = wr->opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : wr->opcode == IBV_WR_SEND ? IBV_WC_SEND : IBV_WC_RDMA_WRITE;
		wc->byte_len = wr->num_sge ? wr->sg_list->length : 0;
		wc->qp_num = qp->qp_num;
		wc->wc_flags = wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM ? IBV_WC_WITH_IMM : 0;
		wc->imm_data = wr->imm_data;
		wc->vendor_err = wr->send_flags & IBV_SEND_SIGNALED ? 0 : 1; /* marks what is completed in silence */
	}
	return 0;
}

static int poll_ring(struct ibv_cq *cq, int want, struct ibv_wc *out)
{
	struct null_queue *n = cq->cq_context;
	int got = 0;
	for (; n->tail != n->head && got < want; n->tail++)
		if (!n->ring[n->tail % n->depth].vendor_err)
			out[got++] = n->ring[n->tail % n->depth];
	return got;
}

static int arm_nothing(struct ibv_cq *cq, int solicited_only) { return 0; }

int hr_null_create(uint32_t depth, struct hr_qp **qp, void **cq)
{
	struct null_queue *n = calloc(1, sizeof(*n) + depth * sizeof(n->ring[0]));
	if (!n)
		return ENOMEM;
	n->depth = depth;
	n->ctx.ops.post_send = depth ? post_ring : post_nothing;
	n->ctx.ops.poll_cq = poll_ring;
	n->ctx.ops.req_notify_cq = arm_nothing;
	n->qp.context = n->cq.context = &n->ctx;
	n->qp.qp_context = n->cq.cq_context = n;
	n->qp.qp_num = 1;
	n->q.qp = &n->qp;
	hr_qp_link(&n->q);
	*qp = &n->q;
	*cq = &n->cq;
	return 0;
}

void hr_null_destroy(struct hr_qp *qp) { free(qp); }

/* As one would write it in C: the requests one after the other, on the stack. */
static void plain(struct hr_qp *q, const struct hr_wr *w, uint32_t n, uint32_t chained)
{
	struct ibv_send_wr wrs[HR_CHAIN], *bad;
	struct ibv_sge sges[HR_CHAIN];
	uint32_t most = chained ? HR_CHAIN : 1;
	for (uint32_t at = 0; at < n;) {
		uint32_t k = n - at < most ? n - at : most;
		for (uint32_t i = 0; i < k; i++) {
			sges[i] = (struct ibv_sge){.addr = w[at + i].local, .length = w[at + i].len, .lkey = w[at + i].lkey};
			wrs[i] = (struct ibv_send_wr){
				.wr_id = w[at + i].id, .sg_list = &sges[i], .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				.next = i + 1 < k ? &wrs[i + 1] : NULL, .send_flags = at + i + 1 == n ? IBV_SEND_SIGNALED : 0,
				.wr.rdma = {.remote_addr = w[at + i].remote, .rkey = w[at + i].rkey},
			};
		}
		ibv_post_send(q->qp, wrs, &bad);
		at += k;
	}
}

uint64_t hr_null_loop(struct hr_qp *qp, const struct hr_wr *w, uint32_t n, uint32_t rounds, uint32_t chained)
{
	struct timespec a, b;
	clock_gettime(CLOCK_MONOTONIC, &a);
	for (uint32_t i = 0; i < rounds; i++)
		plain(qp, w, n, chained);
	clock_gettime(CLOCK_MONOTONIC, &b);
	return (uint64_t)(b.tv_sec - a.tv_sec) * 1000000000u + (uint64_t)b.tv_nsec - (uint64_t)a.tv_nsec;
}

#else

int hr_null_create(uint32_t depth, struct hr_qp **qp, void **cq) { return ENOSYS; }
void hr_null_destroy(struct hr_qp *qp) {}
uint64_t hr_null_loop(struct hr_qp *qp, const struct hr_wr *w, uint32_t n, uint32_t rounds, uint32_t chained) { return 0; }

#endif
