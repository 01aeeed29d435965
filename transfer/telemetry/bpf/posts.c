/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * Times work requests from posting to the completion that speaks of them, one in 32. It looks at two functions of the
 * daemon's own that those pass (cgo/post.c): what a device's driver does is not the kernel's to see.
 */
#include "bpf.h"

enum { POSTS_MAX = 16384, QUEUES_MAX = 4096, SLOTS = 40 };

/* As in cgo/verbs.h, whose sizes are asserted there. */
struct hr_wr {
	u64 local, remote, id;
	u32 len, lkey, rkey, imm, op, flags;
};

struct hr_wc {
	u64 id;
	u32 status, op, bytes, imm, qpn, has_imm, vendor, reserved;
};

enum { QP_NUM = 52 /* in struct ibv_qp, part of libibverbs' ABI */ };

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

/* hr_post_sampled(struct hr_qp *q, const struct hr_wr *w) */
SEC("uprobe") int post_sampled(struct pt_regs *ctx)
{
	struct post p = {};
	void *qp = 0;
	if (bpf_probe_read_user(&qp, sizeof(qp), (void *)ARG1(ctx)) || bpf_probe_read_user(&p.qpn, sizeof(p.qpn), qp + QP_NUM) ||
	    bpf_probe_read_user(&p.context, sizeof(p.context), qp) || /* its first member */
	    bpf_probe_read_user(&p.id, sizeof(p.id), &((struct hr_wr *)ARG2(ctx))->id))
		return 0;
	u64 now = bpf_ktime_get_ns();
	bpf_map_update_elem(&posted, &p, &now, BPF_ANY);
	return 0;
}

/* hr_poll_sampled(void *cq, const struct hr_wc *w); struct ibv_cq begins with its context, as struct ibv_qp does. */
SEC("uprobe") int poll_sampled(struct pt_regs *ctx)
{
	struct post p = {};
	struct hr_wc *w = (void *)ARG2(ctx);
	u64 now = bpf_ktime_get_ns();
	if (bpf_probe_read_user(&p.context, sizeof(p.context), (void *)ARG1(ctx)) || bpf_probe_read_user(&p.id, sizeof(p.id), &w->id) ||
	    bpf_probe_read_user(&p.qpn, sizeof(p.qpn), &w->qpn))
		return 0;
	u64 *since = bpf_map_lookup_elem(&posted, &p);
	if (!since)
		return 0;
	u64 took = now - *since;
	bpf_map_delete_elem(&posted, &p);
	struct times *t = bpf_map_lookup_elem(&queues, &p.qpn);
	if (!t)
		return 0;
	u32 slot = slot_of(took);
	if (slot < SLOTS)
		ADD(t->slots[slot], 1);
	ADD(t->sum_ns, took);
	ADD(t->count, 1);
	return 0;
}

char _license[] SEC("license") = "Dual MIT/GPL";
