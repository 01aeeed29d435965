// The ceilings that headrace bench transfer holds its figures against: what plain loops over the same
// scattered blocks reach on this machine. Built with the system's C compiler when there is one.
//
//   limits tcp  BLOCK BYTES REGION VECTORS   writev in one process, readv in another, over loopback
//   limits copy BLOCK BYTES REGION THREADS   memcpy from one memfd into another
//
// One JSON object on stdout: bytes, seconds from the first byte to the last, CPU seconds of both sides meanwhile.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <err.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
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

static struct result over_tcp(void) {
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof a;
	int l = socket(AF_INET, SOCK_STREAM, 0), up[2], ready[2];
	if (l < 0 || bind(l, (void *)&a, sizeof a) || listen(l, 1) || getsockname(l, (void *)&a, &len) || pipe(up) || pipe(ready))
		err(1, "listen");
	pid_t child = fork();
	if (child < 0)
		err(1, "fork");
	if (child == 0) {
		char *m = memory(1);
		uint32_t *order = shuffled(2);
		if (write(ready[1], "r", 1) != 1)
			err(1, "pipe");
		int s = accept(l, NULL, NULL);
		if (s < 0)
			err(1, "accept");
		struct result r = {0};
		double before = cpu(), start = 0;
		stream(s, m, order, readv, &start);
		r = (struct result){wall() - start, cpu() - before};
		_exit(write(up[1], &r, sizeof r) != sizeof r);
	}
	char *m = memory(2), c;
	uint32_t *order = shuffled(1);
	if (read(ready[0], &c, 1) != 1)
		err(1, "receiver");
	int s = socket(AF_INET, SOCK_STREAM, 0);
	if (s < 0 || connect(s, (void *)&a, sizeof a))
		err(1, "connect");
	double before = cpu();
	stream(s, m, order, (move_fn)writev, NULL);
	double spent = cpu() - before;
	struct result r;
	if (read(up[0], &r, sizeof r) != sizeof r)
		errx(1, "receiver failed");
	waitpid(child, NULL, 0);
	r.cpu_seconds += spent;
	return r;
}

static char *copy_src, *copy_dst;
static uint32_t *copy_from, *copy_to;

static void *copy_part(void *arg) {
	size_t blocks = region / block, count = total / block;
	for (size_t k = (size_t)(uintptr_t)arg; k < count; k += width)
		memcpy(copy_dst + copy_to[k % blocks] * block, copy_src + copy_from[k % blocks] * block, block);
	return NULL;
}

static struct result by_copy(void) {
	copy_src = memory(2), copy_dst = memory(1), copy_from = shuffled(1), copy_to = shuffled(2);
	pthread_t t[MAX_VECTORS];
	double start = wall(), before = cpu();
	for (size_t i = 1; i < width; i++)
		if (pthread_create(&t[i], NULL, copy_part, (void *)(uintptr_t)i))
			errx(1, "thread");
	copy_part(NULL);
	for (size_t i = 1; i < width; i++)
		pthread_join(t[i], NULL);
	return (struct result){wall() - start, cpu() - before};
}

int main(int argc, char **argv) {
	if (argc != 6)
		errx(2, "usage: limits tcp|copy BLOCK BYTES REGION VECTORS|THREADS");
	block = strtoull(argv[2], NULL, 10), total = strtoull(argv[3], NULL, 10);
	region = strtoull(argv[4], NULL, 10), width = strtoull(argv[5], NULL, 10);
	if (!block || region % block || total < block || width < 1 || width > MAX_VECTORS)
		errx(2, "sizes make no sense");
	struct result r = strcmp(argv[1], "tcp") ? by_copy() : over_tcp();
	printf("{\"bytes\": %zu, \"seconds\": %.6f, \"cpu_seconds\": %.6f}\n", total / block * block, r.seconds, r.cpu_seconds);
}
