/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * Counts what goes through TCP lanes. The daemon enters a lane's socket before it connects, by its cookie; those that are
 * accepted on the daemon's port enter themselves, and are forgotten again when they close before the daemon says that they
 * are lanes. Other sockets cost a failed lookup a packet, and have no callbacks.
 */
#include "bpf.h"

enum { TCP_CONNECT = 3, PASSIVE_ESTABLISHED = 5, RETRANS = 9, STATE = 10, RTT = 12 };
enum { RETRANS_FLAG = 2, STATE_FLAG = 4, RTT_FLAG = 8 };
enum { TCP_CLOSED = 7, PROTO_TCP = 6, LANES_MAX = 16384 };

struct lane {
	u64 sent_bytes, received_bytes; /* payload, as often as it was sent */
	u64 sent_packets, received_packets; /* that carry payload, as on the wire */
	u64 again_bytes, again_packets;
	u64 rtt_samples;
	u32 rtt_us, rtt_us_min; /* smoothed; of all samples */
};

struct {
	UINT(type, BPF_MAP_TYPE_HASH);
	UINT(max_entries, LANES_MAX);
	UINT(map_flags, BPF_F_NO_PREALLOC);
	TYPE(key, u64); /* the socket's cookie */
	TYPE(value, struct lane);
} lanes SEC(".maps");

/* Those that the daemon said are lanes: it takes them out of both maps itself. */
struct {
	UINT(type, BPF_MAP_TYPE_HASH);
	UINT(max_entries, LANES_MAX);
	UINT(map_flags, BPF_F_NO_PREALLOC);
	TYPE(key, u64);
	TYPE(value, u32);
} adopted SEC(".maps");

struct {
	UINT(type, BPF_MAP_TYPE_HASH);
	UINT(max_entries, 16);
	TYPE(key, u32); /* local port, host order */
	TYPE(value, u32);
} ports SEC(".maps");

/* The field that is read, by name, wherever it stands in this kernel. */
struct tcp_sock {
	u64 bytes_retrans;
} __attribute__((preserve_access_index));

INLINE void retransmitted(struct bpf_sock_ops *ctx, struct lane *l, u32 segments)
{
	ADD(l->again_packets, segments);
	void *sk = ctx->sk;
	if (!sk)
		return;
	struct tcp_sock *tp = bpf_skc_to_tcp_sock(sk);
	if (tp)
		l->again_bytes = tp->bytes_retrans;
}

/* The kernel tells once a round trip, not with each sample. */
INLINE void measured(struct bpf_sock_ops *ctx, struct lane *l)
{
	/* Linux 6.10 says what the average will be; before, there is that without this sample. Both are eight times as much. */
	u32 us = (ctx->args[1] ? ctx->args[1] : ctx->srtt_us) >> 3;
	l->rtt_us = us;
	if (!l->rtt_us_min || us < l->rtt_us_min)
		l->rtt_us_min = us;
	ADD(l->rtt_samples, 1);
}

/* connecting sets the callbacks. A dialled socket has them before it is connected, so that a failure is seen too. */
INLINE void connecting(struct bpf_sock_ops *ctx, u64 cookie, struct lane *l)
{
	if (!l) {
		u32 port = ctx->local_port;
		if (ctx->op != PASSIVE_ESTABLISHED || !bpf_map_lookup_elem(&ports, &port))
			return;
		struct lane fresh = {.again_packets = ctx->total_retrans}; /* the handshake's */
		if (bpf_map_update_elem(&lanes, &cookie, &fresh, BPF_NOEXIST))
			return;
	}
	bpf_sock_ops_cb_flags_set(ctx, RETRANS_FLAG | STATE_FLAG | RTT_FLAG);
}

SEC("sockops") int lane_events(struct bpf_sock_ops *ctx)
{
	u32 op = ctx->op;
	if (op != TCP_CONNECT && op != PASSIVE_ESTABLISHED && op != RETRANS && op != STATE && op != RTT)
		return 1;
	u64 cookie = bpf_get_socket_cookie(ctx);
	struct lane *l = bpf_map_lookup_elem(&lanes, &cookie);
	if (op == TCP_CONNECT || op == PASSIVE_ESTABLISHED) {
		connecting(ctx, cookie, l);
		return 1;
	}
	if (!l)
		return 1;
	if (op == RTT) {
		measured(ctx, l);
	} else if (op == RETRANS) {
		retransmitted(ctx, l, ctx->args[1]);
	} else if (ctx->args[1] == TCP_CLOSED) {
		if (!bpf_map_lookup_elem(&adopted, &cookie))
			bpf_map_delete_elem(&lanes, &cookie);
	}
	return 1;
}

/* payload gives the bytes behind the TCP header, 0 where there is none. The packet begins with the IP header. */
INLINE u32 payload(struct __sk_buff *skb)
{
	u8 ip[20], offset;
	if (bpf_skb_load_bytes(skb, 0, ip, sizeof(ip)))
		return 0;
	u32 header = 40; /* IPv6 without extensions, which TCP packets of ours have none of */
	u8 proto = ip[6];
	if (ip[0] >> 4 == 4) {
		header = (ip[0] & 15) * 4;
		proto = ip[9];
	}
	if (proto != PROTO_TCP || bpf_skb_load_bytes(skb, header + 12, &offset, 1))
		return 0;
	header += (offset >> 4) * 4;
	return skb->len > header ? skb->len - header : 0;
}

INLINE struct lane *lane_of(struct __sk_buff *skb)
{
	u64 cookie = bpf_get_socket_cookie(skb);
	return cookie ? bpf_map_lookup_elem(&lanes, &cookie) : 0;
}

SEC("cgroup_skb/egress") int lane_out(struct __sk_buff *skb)
{
	struct lane *l = lane_of(skb);
	u32 n = l ? payload(skb) : 0;
	if (n) {
		u32 segments = skb->gso_segs;
		ADD(l->sent_bytes, n);
		ADD(l->sent_packets, segments ? segments : 1);
	}
	return 1;
}

SEC("cgroup_skb/ingress") int lane_in(struct __sk_buff *skb)
{
	struct lane *l = lane_of(skb);
	u32 n = l ? payload(skb) : 0;
	if (n) {
		u32 segments = skb->gso_segs;
		ADD(l->received_bytes, n);
		ADD(l->received_packets, segments ? segments : 1);
	}
	return 1;
}

char _license[] SEC("license") = "Dual MIT/GPL";
