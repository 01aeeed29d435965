/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * Counts RoCE v2 packets (UDP 4791) that pass a network device, by direction, peer and the queue pair that they go to. The
 * daemon enters its lanes' queue pairs; what goes to others is counted together, a peer.
 */
#include "bpf.h"

enum { ROCE_PORT = 4791, PROTO_UDP = 17, ETH = 14, BTH = 12, ICRC = 4, FLOWS_MAX = 16384 };
enum { EGRESS = 0, INGRESS = 1 };
enum { TC_NEXT = -1 }; /* TC_ACT_UNSPEC, TCX_NEXT: go on as if nobody had looked */

struct flow {
	u32 ifindex;
	u32 direction;
	u32 qpn; /* that the packets go to; 0: all that are nobody's */
	u32 reserved;
	u8 peer[16]; /* IPv4 as ::ffff:a.b.c.d */
};

struct tally {
	u64 packets, bytes; /* bytes from the IP header on */
	u64 data_packets, data_bytes; /* writes, sends and answers to reads; bytes of payload */
	u64 acks, naks, other;
	u64 again_packets, again_bytes; /* requests whose sequence number had been sent before */
	u32 next; /* sequence number */
	u32 begun;
};

struct {
	UINT(type, BPF_MAP_TYPE_HASH);
	UINT(max_entries, FLOWS_MAX);
	UINT(map_flags, BPF_F_NO_PREALLOC);
	TYPE(key, struct flow);
	TYPE(value, struct tally);
} flows SEC(".maps");

/* Packets that could not be counted because there are too many flows. */
struct {
	UINT(type, BPF_MAP_TYPE_ARRAY);
	UINT(max_entries, 1);
	TYPE(key, u32);
	TYPE(value, u64);
} lost SEC(".maps");

INLINE struct tally *tally_of(struct flow *f)
{
	struct tally *t = bpf_map_lookup_elem(&flows, f);
	if (t)
		return t;
	f->qpn = 0;
	t = bpf_map_lookup_elem(&flows, f);
	if (t)
		return t;
	struct tally fresh = {};
	bpf_map_update_elem(&flows, f, &fresh, BPF_NOEXIST);
	return bpf_map_lookup_elem(&flows, f);
}

/* extended gives the size of the headers between BTH and payload: by opcode of reliable connections, 255 where unknown. */
INLINE u32 extended(u8 opcode)
{
	switch (opcode) {
	case 0: case 1: case 2: case 4: case 7: case 8: case 14: return 0;
	case 3: case 5: case 9: case 13: case 15: case 16: case 22: case 23: return 4;
	case 6: case 10: return 16;
	case 11: return 20;
	default: return 255;
	}
}

/* again tells whether a request's sequence number had come before. Numbers go up by one, in 24 bits. */
INLINE int again(struct tally *t, u32 psn)
{
	u32 ahead = (psn - t->next) & 0xffffff;
	if (t->begun && ahead >= 0x800000)
		return 1;
	t->next = (psn + 1) & 0xffffff;
	t->begun = 1;
	return 0;
}

INLINE void count(struct tally *t, const u8 *bth, u8 syndrome, u32 bytes, u32 udp, u32 qpn)
{
	u8 opcode = bth[0];
	ADD(t->packets, 1);
	ADD(t->bytes, bytes);
	if (opcode == 17) {
		if (syndrome >> 5 & 3) /* 1: receiver not ready, 3: out of order and other refusals */
			ADD(t->naks, 1);
		else
			ADD(t->acks, 1);
		return;
	}
	u32 head = extended(opcode), frame = 8 + BTH + ICRC;
	u32 n = 0;
	if (head != 255) {
		frame += head + (bth[1] >> 4 & 3); /* padding */
		n = udp > frame ? udp - frame : 0;
		ADD(t->data_packets, 1);
		ADD(t->data_bytes, n);
	} else if (opcode != 12 && opcode != 19 && opcode != 20) {
		ADD(t->other, 1);
		return;
	}
	if (qpn && !(opcode >= 13 && opcode <= 16) && again(t, be24(bth + 9))) {
		ADD(t->again_packets, 1);
		ADD(t->again_bytes, n);
	}
}

INLINE int packet(struct __sk_buff *skb, u32 direction)
{
	u8 ip[40], udp[8], bth[BTH], aeth = 0;
	struct flow f = {};
	u32 header = 40;
	if (bpf_skb_load_bytes(skb, ETH, ip, 20))
		return TC_NEXT;
	if (ip[0] >> 4 == 4) {
		if (ip[9] != PROTO_UDP)
			return TC_NEXT;
		header = (ip[0] & 15) * 4;
		f.peer[10] = f.peer[11] = 0xff;
		for (int i = 0; i < 4; i++)
			f.peer[12 + i] = direction == EGRESS ? ip[16 + i] : ip[12 + i];
	} else if (ip[0] >> 4 == 6 && ip[6] == PROTO_UDP) {
		if (bpf_skb_load_bytes(skb, ETH, ip, sizeof(ip)))
			return TC_NEXT;
		for (int i = 0; i < 16; i++)
			f.peer[i] = direction == EGRESS ? ip[24 + i] : ip[8 + i];
	} else {
		return TC_NEXT;
	}
	if (bpf_skb_load_bytes(skb, ETH + header, udp, sizeof(udp)) || be16(udp + 2) != ROCE_PORT)
		return TC_NEXT;
	if (bpf_skb_load_bytes(skb, ETH + header + 8, bth, sizeof(bth)))
		return TC_NEXT;
	bpf_skb_load_bytes(skb, ETH + header + 8 + BTH, &aeth, 1); /* an acknowledgement's */
	f.ifindex = skb->ifindex;
	f.direction = direction;
	f.qpn = be24(bth + 5);
	struct tally *t = tally_of(&f);
	if (t) {
		count(t, bth, aeth, skb->len - ETH, be16(udp + 4), f.qpn);
		return TC_NEXT;
	}
	u32 zero = 0;
	u64 *n = bpf_map_lookup_elem(&lost, &zero);
	if (n)
		ADD(*n, 1);
	return TC_NEXT;
}

SEC("tc") int roce_out(struct __sk_buff *skb) { return packet(skb, EGRESS); }
SEC("tc") int roce_in(struct __sk_buff *skb) { return packet(skb, INGRESS); }

char _license[] SEC("license") = "Dual MIT/GPL";
