/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/*
 * What the programs in this folder need of the kernel's interface: numbers and layouts from include/uapi/linux/bpf.h, which
 * never change, and of the kernel's own structs only the fields that are read, which the loader finds by name (CO-RE).
 */
#ifndef HEADRACE_BPF_H
#define HEADRACE_BPF_H

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int s32;
typedef long long s64;

#define SEC(name) __attribute__((section(name), used))
#define INLINE static inline __attribute__((always_inline))
#define UINT(name, value) int (*name)[value]
#define TYPE(name, type) type *name

enum { BPF_MAP_TYPE_HASH = 1, BPF_MAP_TYPE_ARRAY = 2, BPF_MAP_TYPE_LRU_HASH = 9 };
enum { BPF_ANY = 0, BPF_NOEXIST = 1 };
#define BPF_F_NO_PREALLOC 1u

/* Helper functions by their numbers. */
static void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static long (*bpf_map_update_elem)(void *map, const void *key, const void *value, u64 flags) = (void *)2;
static long (*bpf_map_delete_elem)(void *map, const void *key) = (void *)3;
static u64 (*bpf_ktime_get_ns)(void) = (void *)5;
static long (*bpf_skb_load_bytes)(const void *skb, u32 offset, void *to, u32 len) = (void *)26;
static u64 (*bpf_get_socket_cookie)(void *ctx) = (void *)46;
static long (*bpf_sock_ops_cb_flags_set)(void *skops, int flags) = (void *)59;
static long (*bpf_probe_read_user)(void *dst, u32 size, const void *from) = (void *)112;
static void *(*bpf_skc_to_tcp_sock)(void *sk) = (void *)137;

#define ADD(field, by) __sync_fetch_and_add(&(field), (by))

/* As big-endian numbers stand in a packet. All targets are little-endian. */
INLINE u16 be16(const u8 *b) { return (u16)b[0] << 8 | b[1]; }
INLINE u32 be24(const u8 *b) { return (u32)b[0] << 16 | (u32)b[1] << 8 | b[2]; }

/* Contexts: the kernel rewrites accesses to them, so the layout is the interface's. Only up to the last field used. */
struct bpf_sock_ops {
	u32 op;
	u32 args[4];
	u32 family, remote_ip4, local_ip4, remote_ip6[4], local_ip6[4];
	u32 remote_port, local_port, is_fullsock;
	u32 snd_cwnd, srtt_us, bpf_sock_ops_cb_flags, state, rtt_min, snd_ssthresh, rcv_nxt, snd_nxt, snd_una, mss_cache, ecn_flags;
	u32 rate_delivered, rate_interval_us, packets_out, retrans_out, total_retrans, segs_in, data_segs_in, segs_out, data_segs_out;
	u32 lost_out, sacked_out, sk_txhash;
	u64 bytes_received, bytes_acked;
	void *sk;
};

struct __sk_buff {
	u32 len, pkt_type, mark, queue_mapping, protocol, vlan_present, vlan_tci, vlan_proto, priority, ingress_ifindex, ifindex;
	u32 tc_index, cb[5], hash, tc_classid, data, data_end, napi_id;
	u32 family, remote_ip4, local_ip4, remote_ip6[4], local_ip6[4], remote_port, local_port, data_meta;
	u64 flow_keys, tstamp;
	u32 wire_len, gso_segs;
	u64 sk;
	u32 gso_size;
};

#if defined(__TARGET_ARCH_x86)
struct pt_regs {
	unsigned long r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx, dx, si, di;
};
#define ARG1(r) ((r)->di)
#define ARG2(r) ((r)->si)
#define ARG3(r) ((r)->dx)
#elif defined(__TARGET_ARCH_arm64)
struct pt_regs { /* its first part, which user space sees too: struct user_pt_regs */
	u64 regs[31];
};
#define ARG1(r) ((r)->regs[0])
#define ARG2(r) ((r)->regs[1])
#define ARG3(r) ((r)->regs[2])
#endif

#endif
