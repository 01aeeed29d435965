// The ceilings that headrace bench transfer holds its figures against: what plain loops over the same
// scattered blocks reach on this machine. Built with the system's C compiler when there is one.
//
//   limits REGION      two memfds of REGION bytes, and a second process that has them mapped too
//
// It stays and reads requests from stdin, one a line, so that no run pays for fresh memory:
//
//   tcp BLOCK BYTES VECTORS    writev here, readv in the other process, over loopback; tcp:NAME with that congestion control
//   copy BLOCK BYTES THREADS   memcpy block by block from one memfd into the other
//   plain BLOCK BYTES THREADS  memcpy of the whole, each thread a contiguous share; BLOCK is not used
//
// One JSON object a request on stdout: bytes, seconds from the first byte to the last, CPU seconds of both sides meanwhile.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <err.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MAX_VECTORS 256

struct result {
	double seconds, cpu_seconds;
};

static size_t block, total, region, width;

static double wall(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static double cpu(void) {
	struct rusage u;
	getrusage(RUSAGE_SELF, &u);
	return u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

static char *src, *dst;

static char *memory(int fill) {
	int fd = memfd_create("limits", MFD_CLOEXEC);
	if (fd < 0 || ftruncate(fd, region))
		err(1, "memfd of %zu bytes", region);
	char *m = mmap(NULL, region, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (m == MAP_FAILED)
		err(1, "mmap");
	memset(m, fill, region);
	return m;
}

// shuffled returns the region's block numbers in an order of its own for each seed.
static uint32_t *shuffled(uint64_t seed) {
	size_t n = region / block;
	uint32_t *p = malloc(n * sizeof *p);
	if (!p)
		err(1, "malloc");
	for (size_t i = 0; i < n; i++)
		p[i] = i;
	for (size_t i = n - 1; i > 0; i--) {
		seed = seed * 6364136223846793005u + 1442695040888963407u;
		size_t j = (seed >> 33) % (i + 1);
		uint32_t t = p[i];
		p[i] = p[j];
		p[j] = t;
	}
	return p;
}

typedef ssize_t (*move_fn)(int, const struct iovec *, int);

// stream moves total bytes between fd and the blocks of m; started, if given, gets the time of the first byte.
static void stream(int fd, char *m, const uint32_t *order, move_fn move, double *started) {
	size_t blocks = region / block, count = total / block;
	for (size_t k = 0; k < count;) {
		struct iovec io[MAX_VECTORS];
		int n = 0, i = 0;
		for (; n < (int)width && k + n < count; n++)
			io[n] = (struct iovec){m + order[(k + n) % blocks] * block, block};
		while (i < n) {
			ssize_t got = move(fd, io + i, n - i);
			if (got <= 0)
				err(1, "move");
			if (started && *started == 0)
				*started = wall();
			for (; i < n && (size_t)got >= io[i].iov_len; i++)
				got -= io[i].iov_len;
			if (i < n) {
				io[i].iov_base = (char *)io[i].iov_base + got;
				io[i].iov_len -= got;
			}
		}
		k += n;
	}
}

struct request {
	size_t block, total, width;
};

static int requests[2], results[2];

static void transfer_exactly(ssize_t (*move)(int, void *, size_t), int fd, void *p, size_t n) {
	if (move(fd, p, n) != (ssize_t)n) // pipes keep what is this small together
		exit(0);              // the other process has gone
}

// receiver is the other process: it reads each request's bytes into its blocks.
static void receiver(int l) {
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	memset(dst, 1, region); // maps the pages here
	struct result r = {0};
	transfer_exactly((void *)write, results[1], &r, sizeof r);
	for (;;) {
		struct request q;
		transfer_exactly(read, requests[0], &q, sizeof q);
		block = q.block, total = q.total, width = q.width;
		uint32_t *order = shuffled(2);
		int s = accept(l, NULL, NULL);
		if (s < 0)
			err(1, "accept");
		double before = cpu(), start = 0;
		stream(s, dst, order, readv, &start);
		r = (struct result){wall() - start, cpu() - before};
		transfer_exactly((void *)write, results[1], &r, sizeof r);
		close(s);
		free(order);
	}
}

static struct sockaddr_in address;

static void start_receiver(void) {
	address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof address;
	int l = socket(AF_INET, SOCK_STREAM, 0);
	if (l < 0 || bind(l, (void *)&address, sizeof address) || listen(l, 1) || getsockname(l, (void *)&address, &len) || pipe(requests) || pipe(results))
		err(1, "listen");
	pid_t child = fork();
	if (child < 0)
		err(1, "fork");
	if (child == 0) {
		close(requests[1]);
		close(results[0]);
		receiver(l);
	}
	close(l);
	close(requests[0]);
	close(results[1]);
	struct result r;
	transfer_exactly(read, results[0], &r, sizeof r);
}

static struct result over_tcp(const char *congestion) {
	struct request q = {.block = block, .total = total, .width = width};
	uint32_t *order = shuffled(1);
	transfer_exactly((void *)write, requests[1], &q, sizeof q);
	int s = socket(AF_INET, SOCK_STREAM, 0);
	if (*congestion && setsockopt(s, IPPROTO_TCP, TCP_CONGESTION, congestion, strlen(congestion)))
		err(1, "congestion control %s", congestion);
	if (s < 0 || connect(s, (void *)&address, sizeof address))
		err(1, "connect");
	double before = cpu();
	stream(s, src, order, (move_fn)writev, NULL);
	double spent = cpu() - before;
	struct result r;
	transfer_exactly(read, results[0], &r, sizeof r);
	close(s);
	free(order);
	r.cpu_seconds += spent;
	return r;
}

static uint32_t *copy_from, *copy_to;

static void *copy_part(void *arg) {
	size_t blocks = region / block, count = total / block;
	for (size_t k = (size_t)(uintptr_t)arg; k < count; k += width)
		memcpy(dst + copy_to[k % blocks] * block, src + copy_from[k % blocks] * block, block);
	return NULL;
}

static void *plain_part(void *arg) {
	size_t share = region / width, at = (size_t)(uintptr_t)arg * share;
	for (size_t k = 0; k < total / region; k++)
		memcpy(dst + at, src + at, share);
	return NULL;
}

static struct result threaded(void *(*part)(void *)) {
	pthread_t t[MAX_VECTORS];
	double start = wall(), before = cpu();
	for (size_t i = 1; i < width; i++)
		if (pthread_create(&t[i], NULL, part, (void *)(uintptr_t)i))
			errx(1, "thread");
	part(NULL);
	for (size_t i = 1; i < width; i++)
		pthread_join(t[i], NULL);
	return (struct result){wall() - start, cpu() - before};
}

static struct result by_copy(void) {
	copy_from = shuffled(1), copy_to = shuffled(2);
	struct result r = threaded(copy_part);
	free(copy_from);
	free(copy_to);
	return r;
}

int main(int argc, char **argv) {
	if (argc != 2 || (region = strtoull(argv[1], NULL, 10)) == 0)
		errx(2, "usage: limits REGION");
	signal(SIGPIPE, SIG_IGN);
	src = memory(2), dst = memory(1);
	start_receiver();
	char kind[32];
	while (scanf("%31s %zu %zu %zu", kind, &block, &total, &width) == 4) {
		int plain = !strcmp(kind, "plain");
		if (plain)
			block = region;
		if (!block || region % block || total < block || width < 1 || width > MAX_VECTORS)
			errx(2, "sizes make no sense");
		struct result r = plain ? threaded(plain_part) : !strncmp(kind, "tcp", 3) ? over_tcp(kind[3] ? kind + 4 : "") : by_copy();
		printf("{\"bytes\": %zu, \"seconds\": %.6f, \"cpu_seconds\": %.6f}\n", total / block * block, r.seconds, r.cpu_seconds);
		fflush(stdout);
	}
	return 0; // the receiver reads the end of its pipe, or the death signal
}
