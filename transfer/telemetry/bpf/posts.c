/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * Times work requests from posting to the completion that speaks of them. It looks at the two functions of the daemon's own
 * through which they go (cgo/post.c: hr_post_send, hr_polled): what a device's driver does is not the kernel's to see.
 */
#include "bpf.h"

enum { POSTS_MAX = 16384, QUEUES_MAX = 4096, SLOTS = 40, TOGETHER_MAX = 32 };

/* As in cgo/verbs.h, whose sizes are asserted there. */
struct hr_wr {
	u64 local, remote, id;
	u32 len, lkey, rkey, imm, op, flags;
};

struct hr_wc {
	u64 id;
	u32 status, op, bytes, imm, qpn, has_imm, vendor, reserved;
};

enum { HR_SIGNALED = 1, QP_NUM = 52 /* in struct ibv_qp, part of libibverbs' ABI */ };

struct post {
	u64 context; /* of the device: queue pairs of two may have the same number */
	u64 id;
	u32 qpn;
	u32 reserved;
};

/* Slot i counts times below 2^i nanoseconds, and not below half of it. */
struct times {
	u64 slots[SLOTS];
	u64 sum_ns;
	u64 count;
};

struct {
	UINT(type, BPF_MAP_TYPE_LRU_HASH); /* what never completes is pushed out */
	UINT(max_entries, POSTS_MAX);
	TYPE(key, struct post);
	TYPE(value, u64); /* when */
} posted SEC(".maps");

struct {
	UINT(type, BPF_MAP_TYPE_HASH);
	UINT(max_entries, QUEUES_MAX);
	UINT(map_flags, BPF_F_NO_PREALLOC);
	TYPE(key, u32); /* queue pair */
	TYPE(value, struct times);
} queues SEC(".maps");

INLINE u32 slot_of(u64 ns)
{
	u32 slot = 0;
	for (int i = 5; i >= 0; i--) /* the number of bits, by halving */
		if (ns >> (1u << i)) {
			ns >>= 1u << i;
			slot += 1u << i;
		}
	slot += ns != 0;
	return slot < SLOTS ? slot : SLOTS - 1;
}

/* hr_post_send(struct hr_qp *q, const struct hr_wr *w, uint32_t n): the last of a chain speaks for it. */
SEC("uprobe") int post_send(struct pt_regs *ctx)
{
	struct post p = {};
	struct hr_wr w;
	void *qp = 0;
	u32 n = (u32)ARG3(ctx);
	if (!n || bpf_probe_read_user(&w, sizeof(w), (void *)(ARG2(ctx) + (u64)(n - 1) * sizeof(w))) || !(w.flags & HR_SIGNALED))
		return 0;
	if (bpf_probe_read_user(&qp, sizeof(qp), (void *)ARG1(ctx)) || bpf_probe_read_user(&p.qpn, sizeof(p.qpn), qp + QP_NUM) ||
	    bpf_probe_read_user(&p.context, sizeof(p.context), qp)) /* its first member */
		return 0;
	p.id = w.id;
	u64 now = bpf_ktime_get_ns();
	bpf_map_update_elem(&posted, &p, &now, BPF_ANY);
	return 0;
}

INLINE void completed(u64 context, const struct hr_wc *wc, u64 now)
{
	struct post p = {.context = context, .id = wc->id, .qpn = wc->qpn};
	u64 *since = bpf_map_lookup_elem(&posted, &p);
	if (!since)
		return;
	u64 took = now - *since;
	bpf_map_delete_elem(&posted, &p);
	struct times *t = bpf_map_lookup_elem(&queues, &p.qpn);
	if (!t)
		return;
	u32 slot = slot_of(took);
	if (slot < SLOTS)
		ADD(t->slots[slot], 1);
	ADD(t->sum_ns, took);
	ADD(t->count, 1);
}

/* hr_polled(void *cq, const struct hr_wc *wc, uint32_t n); struct ibv_cq begins with its context, as struct ibv_qp does. */
SEC("uprobe") int polled(struct pt_regs *ctx)
{
	u64 at = ARG2(ctx), now = bpf_ktime_get_ns(), context = 0;
	u32 n = (u32)ARG3(ctx);
	if (bpf_probe_read_user(&context, sizeof(context), (void *)ARG1(ctx)))
		return 0;
	for (u32 i = 0; i < TOGETHER_MAX; i++) {
		struct hr_wc wc;
		if (i >= n || bpf_probe_read_user(&wc, sizeof(wc), (void *)(at + (u64)i * sizeof(wc))))
			break;
		completed(context, &wc, now);
	}
	return 0;
}

char _license[] SEC("license") = "Dual MIT/GPL";
