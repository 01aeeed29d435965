/*
 * A stand-in for the CUDA driver, for what a real one will not do on demand: to lack a function, to be too old, to refuse
 * an export, to fail in the middle. Device memory is host memory here, of memfds, so that descriptors and IPC handles lead to
 * the same bytes. It is strict where the real one is: calls need a current context, ranges must be mapped, exports page-aligned.
 *
 * Environment: CUDA_STANDIN_FAULTS "function=result,...", CUDA_STANDIN_LOG a file that calls are appended to,
 * CUDA_STANDIN_DEVICES how many there are. -DLACKS_EXPORT, -DLACKS_RETAIN, -DOLD build a driver without some functions.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NOT_INIT = 3, NO_DEVICE = 100, BAD_DEVICE = 101, BAD_CONTEXT = 201, BAD_HANDLE = 400, NOT_SUPPORTED = 801 };
enum { DEVICES = 8, BLOCKS = 4096, DEEP = 16, GRANULE = 2 << 20 };

typedef uint64_t ptr;
typedef struct {
	char b[64];
} ipc;
struct block { /* one allocation, segment or opened handle */
	ptr at;
	size_t size;
	int fd, device, segment, foreign;
};
struct name {
	int64_t pid, fd, size, device;
};
struct location {
	int type, id;
};
struct prop {
	int type, handles;
	struct location where;
	void *win32;
	unsigned char compression, gdr;
	unsigned short usage;
	unsigned char reserved[4];
};
struct event {
	struct timespec at;
	int flags, recorded;
};

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static struct block blocks[BLOCKS];
static int started, refs[DEVICES];
static __thread void *stack[DEEP];
static __thread int depth;

static void note(const char *function, const char *format, ...)
{
	const char *file = getenv("CUDA_STANDIN_LOG");
	if (!file || !*file)
		return;
	char line[256];
	int n = snprintf(line, sizeof(line), "%s", function);
	va_list v;
	va_start(v, format);
	n += vsnprintf(line + n, sizeof(line) - n - 1, format, v);
	va_end(v);
	line[n++] = '\n';
	int fd = open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	if (fd >= 0) {
		ssize_t w = write(fd, line, n);
		(void)w;
		close(fd);
	}
}

static int fault(const char *function)
{
	const char *s = getenv("CUDA_STANDIN_FAULTS");
	size_t n = strlen(function);
	for (; s && *s; s = strchr(s, ',') ? strchr(s, ',') + 1 : NULL)
		if (!strncmp(s, function, n) && s[n] == '=')
			return atoi(s + n + 1);
	return OK;
}

#define CALL(...) \
	do { \
		note(__func__, " " __VA_ARGS__); \
		int f_ = fault(__func__); \
		if (f_) \
			return f_; \
		if (!started && strcmp(__func__, "cuInit")) \
			return NOT_INIT; \
	} while (0)
#define IN_CONTEXT \
	do { \
		if (!depth || refs[current()] <= 0) \
			return BAD_CONTEXT; \
	} while (0)

static int count(void)
{
	const char *s = getenv("CUDA_STANDIN_DEVICES");
	return s && *s ? atoi(s) : 1;
}
static int current(void) { return depth ? (int)((intptr_t)stack[depth - 1] & 0xff) : 0; }
static int bad(int dev) { return dev < 0 || dev >= count() || dev >= DEVICES; }

static struct block *find(ptr p)
{
	for (int i = 0; i < BLOCKS; i++)
		if (blocks[i].size && p >= blocks[i].at && p < blocks[i].at + blocks[i].size)
			return &blocks[i];
	return NULL;
}

/* Whether a whole range is memory. */
static int covered(ptr p, size_t n)
{
	int ok = 1;
	pthread_mutex_lock(&mu);
	for (ptr at = p; ok && at < p + n;) {
		struct block *b = find(at);
		ok = b != NULL;
		if (b)
			at = b->at + b->size;
	}
	pthread_mutex_unlock(&mu);
	return ok;
}

static int add(ptr at, size_t size, int fd, int device, int segment, int foreign)
{
	int r = NO_MEMORY;
	pthread_mutex_lock(&mu);
	for (int i = 0; i < BLOCKS && r; i++)
		if (!blocks[i].size) {
			blocks[i] = (struct block){ at, size, fd, device, segment, foreign };
			r = OK;
		}
	pthread_mutex_unlock(&mu);
	return r;
}

/* Takes a block that begins there out of the list. */
static int take(ptr at, int segment, int foreign, struct block *out)
{
	int r = INVALID;
	pthread_mutex_lock(&mu);
	struct block *b = find(at);
	if (b && b->at == at && b->segment == segment && b->foreign == foreign) {
		*out = *b;
		b->size = 0;
		r = OK;
	}
	pthread_mutex_unlock(&mu);
	return r;
}

static int file_of(size_t size)
{
	int fd = memfd_create("cuda-standin", MFD_CLOEXEC);
	if (fd >= 0 && ftruncate(fd, size)) {
		close(fd);
		fd = -1;
	}
	return fd;
}

int cuInit(unsigned flags)
{
	CALL("%u", flags);
	started = 1;
	return flags ? INVALID : OK;
}
int cuDriverGetVersion(int *v)
{
	CALL("");
#ifdef OLD
	*v = 11020;
#else
	*v = 13000;
#endif
	return OK;
}
int cuGetErrorName(int r, const char **s)
{
	*s = r == NOT_SUPPORTED ? "CUDA_ERROR_NOT_SUPPORTED" : r == BAD_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : r == INVALID ? "CUDA_ERROR_INVALID_VALUE" : NULL;
	return *s ? OK : INVALID;
}
int cuGetErrorString(int r, const char **s)
{
	*s = r == NOT_SUPPORTED ? "operation not supported" : NULL;
	return *s ? OK : INVALID;
}
int cuDeviceGetCount(int *n)
{
	CALL("");
	*n = count();
	return OK;
}
int cuDeviceGet(int *dev, int ordinal)
{
	CALL("%d", ordinal);
	*dev = ordinal;
	return bad(ordinal) ? BAD_DEVICE : OK;
}
int cuDeviceGetName(char *s, int n, int dev)
{
	CALL("%d", dev);
	snprintf(s, n, "Stand-in %d", dev);
	return bad(dev) ? BAD_DEVICE : OK;
}
#ifdef OLD
int cuDeviceGetUuid(char *u, int dev)
#else
int cuDeviceGetUuid_v2(char *u, int dev)
#endif
{
	CALL("%d", dev);
	memset(u, 0x10 + dev, 16);
	return OK;
}
int cuDeviceTotalMem_v2(size_t *n, int dev)
{
	CALL("%d", dev);
	*n = (size_t)16 << 30;
	return OK;
}
int cuDeviceGetPCIBusId(char *s, int n, int dev)
{
	CALL("%d", dev);
	snprintf(s, n, "0000:%02X:00.0", 0x3b + dev);
	return OK;
}
int cuDeviceGetAttribute(int *v, int which, int dev)
{
	CALL("%d %d", which, dev);
	switch (which) {
	case 75:
		*v = 9;
		return OK;
	case 76:
		*v = 0;
		return OK;
	case 41: case 102: case 110: case 116: case 117:
		*v = 1;
		return OK;
	case 118:
		*v = 100;
		return OK;
	case 124:
		*v = getenv("CUDA_STANDIN_NO_DMABUF") == NULL;
		return OK;
	}
	return INVALID;
}
#ifndef LACKS_RETAIN
int cuDevicePrimaryCtxRetain(void **ctx, int dev)
{
	CALL("%d", dev);
	if (bad(dev))
		return BAD_DEVICE;
	__sync_add_and_fetch(&refs[dev], 1);
	*ctx = (void *)(intptr_t)(0x1000 + dev);
	return OK;
}
#endif
int cuDevicePrimaryCtxRelease_v2(int dev)
{
	CALL("%d", dev);
	return bad(dev) || __sync_sub_and_fetch(&refs[dev], 1) < 0 ? BAD_CONTEXT : OK;
}
int cuCtxPushCurrent_v2(void *ctx)
{
	CALL("");
	if (!ctx || depth == DEEP)
		return BAD_CONTEXT;
	stack[depth++] = ctx;
	return OK;
}
int cuCtxPopCurrent_v2(void **ctx)
{
	CALL("");
	if (!depth)
		return BAD_CONTEXT;
	*ctx = stack[--depth];
	return OK;
}
int cuMemAlloc_v2(ptr *p, size_t n)
{
	CALL("%zu", n);
	IN_CONTEXT;
	int fd = n ? file_of(n) : -1;
	if (fd < 0)
		return n ? NO_MEMORY : INVALID;
	void *m = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	*p = (uintptr_t)m;
	return m == MAP_FAILED ? NO_MEMORY : add(*p, n, fd, current(), 0, 0);
}
int cuMemFree_v2(ptr p)
{
	CALL("");
	IN_CONTEXT;
	struct block b;
	int r = take(p, 0, 0, &b);
	if (!r) {
		munmap((void *)b.at, b.size);
		close(b.fd);
	}
	return r;
}
int cuMemsetD8_v2(ptr p, unsigned char c, size_t n)
{
	CALL("%zu", n);
	IN_CONTEXT;
	if (!covered(p, n))
		return INVALID;
	memset((void *)p, c, n);
	return OK;
}
int cuMemHostAlloc(void **p, size_t n, unsigned flags)
{
	CALL("%zu %u", n, flags);
	IN_CONTEXT;
	return posix_memalign(p, 4096, n) ? NO_MEMORY : OK;
}
int cuMemFreeHost(void *p)
{
	CALL("");
	IN_CONTEXT;
	free(p);
	return OK;
}
int cuMemHostRegister_v2(void *p, size_t n, unsigned flags)
{
	CALL("%zu %u", n, flags);
	IN_CONTEXT;
	return p ? OK : INVALID;
}
int cuMemHostUnregister(void *p)
{
	CALL("");
	IN_CONTEXT;
	return p ? OK : INVALID;
}
int cuMemGetAddressRange_v2(ptr *base, size_t *n, ptr p)
{
	CALL("");
	IN_CONTEXT;
	pthread_mutex_lock(&mu);
	struct block *b = find(p);
	if (b) {
		*base = b->at;
		*n = b->size;
	}
	pthread_mutex_unlock(&mu);
	return b ? OK : INVALID;
}
int cuPointerGetAttribute(void *v, int which, ptr p)
{
	CALL("%d", which);
	IN_CONTEXT;
	pthread_mutex_lock(&mu);
	struct block *b = find(p);
	int device = b ? b->device : 0, segment = b ? b->segment : 0;
	pthread_mutex_unlock(&mu);
	if (!b)
		return INVALID;
	switch (which) {
	case 9:
		*(int *)v = device;
		return OK;
	case 10:
		*(unsigned char *)v = !segment;
		return OK;
	case 15:
		*(unsigned char *)v = 1;
		return OK;
	}
	return INVALID;
}
int cuPointerSetAttribute(const void *v, int which, ptr p)
{
	CALL("%d %u", which, *(const unsigned *)v);
	IN_CONTEXT;
	return covered(p, 1) ? OK : INVALID;
}
#ifndef LACKS_EXPORT
int cuMemGetHandleForAddressRange(void *handle, ptr p, size_t n, int type, unsigned long long flags)
{
	CALL("%zu %d %llu", n, type, flags);
	IN_CONTEXT;
	if (type != 1 || p % 4096 || n % 4096 || !n)
		return INVALID;
	pthread_mutex_lock(&mu);
	struct block *b = find(p), *e = find(p + n - 4096);
	int one = b && b == e;
	/* Of several segments the descriptor has the size and not the bytes; of one it has both. */
	int fd = one && p == b->at ? fcntl(b->fd, F_DUPFD, 3) : -1;
	pthread_mutex_unlock(&mu);
	if (!one && getenv("CUDA_STANDIN_SEGMENTS_APART"))
		return INVALID;
	if (!one && !covered(p, n))
		return INVALID;
	*(int *)handle = fd >= 0 ? fd : file_of(n);
	return OK;
}
#endif
#ifndef OLD
int cuFlushGPUDirectRDMAWrites(int target, int scope)
{
	CALL("%d %d", target, scope);
	IN_CONTEXT;
	return target || scope != 100 ? INVALID : OK;
}
int cuMemGetAllocationGranularity(size_t *n, const struct prop *p, int option)
{
	CALL("%d %d", p->where.id, option);
	*n = GRANULE;
	return p->type == 1 && p->where.type == 1 ? OK : INVALID;
}
int cuMemAddressReserve(ptr *p, size_t n, size_t align, ptr hint, unsigned long long flags)
{
	CALL("%zu", n);
	void *m = mmap((void *)hint, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	*p = (uintptr_t)m;
	return align || flags || n % GRANULE ? INVALID : m == MAP_FAILED ? NO_MEMORY : OK;
}
int cuMemAddressFree(ptr p, size_t n)
{
	CALL("%zu", n);
	int mapped = 0;
	pthread_mutex_lock(&mu);
	for (int i = 0; i < BLOCKS; i++)
		mapped |= blocks[i].size && blocks[i].at >= p && blocks[i].at < p + n;
	pthread_mutex_unlock(&mu);
	return mapped || munmap((void *)p, n) ? INVALID : OK;
}
int cuMemCreate(uint64_t *h, size_t n, const struct prop *p, unsigned long long flags)
{
	CALL("%zu gdr %d", n, p->gdr);
	*h = file_of(n);
	return flags || p->type != 1 || n % GRANULE ? INVALID : (int64_t)*h < 0 ? NO_MEMORY : OK;
}
int cuMemRelease(uint64_t h)
{
	CALL("");
	return close((int)h) ? BAD_HANDLE : OK;
}
int cuMemMap(ptr p, size_t n, size_t off, uint64_t h, unsigned long long flags)
{
	CALL("%zu", n);
	int fd = fcntl((int)h, F_DUPFD_CLOEXEC, 3);
	if (off || flags || fd < 0)
		return BAD_HANDLE;
	if (mmap((void *)p, n, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
		return NO_MEMORY;
	return add(p, n, fd, current(), 1, 0);
}
int cuMemUnmap(ptr p, size_t n)
{
	CALL("%zu", n);
	struct block b;
	int r = take(p, 1, 0, &b);
	if (!r) {
		mmap((void *)p, n, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		close(b.fd);
	}
	return r;
}
int cuMemSetAccess(ptr p, size_t n, const void *desc, size_t count)
{
	CALL("%zu %zu", n, count);
	return desc && count == 1 && !mprotect((void *)p, n, PROT_READ | PROT_WRITE) ? OK : INVALID;
}
#endif
int cuIpcGetMemHandle(ipc *h, ptr p)
{
	CALL("");
	IN_CONTEXT;
	pthread_mutex_lock(&mu);
	struct block *b = find(p);
	struct name n = { getpid(), b ? b->fd : -1, b ? (int64_t)b->size : 0, b ? b->device : 0 };
	int ok = b && !b->segment && !b->foreign;
	pthread_mutex_unlock(&mu);
	memset(h, 0, sizeof(*h));
	memcpy(h, &n, sizeof(n));
	return ok ? OK : INVALID;
}
int cuIpcOpenMemHandle_v2(ptr *p, ipc h, unsigned flags)
{
	CALL("%u", flags);
	IN_CONTEXT;
	struct name n;
	memcpy(&n, &h, sizeof(n));
	if (n.pid == getpid())
		return BAD_CONTEXT; /* the real one opens no memory of the same process either */
	char path[64];
	snprintf(path, sizeof(path), "/proc/%lld/fd/%lld", (long long)n.pid, (long long)n.fd);
	int fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return BAD_HANDLE;
	void *m = mmap(NULL, n.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	*p = (uintptr_t)m;
	return m == MAP_FAILED ? NO_MEMORY : add(*p, n.size, fd, (int)n.device, 0, 1);
}
int cuIpcCloseMemHandle(ptr p)
{
	CALL("");
	IN_CONTEXT;
	struct block b;
	int r = take(p, 0, 1, &b);
	if (!r) {
		munmap((void *)b.at, b.size);
		close(b.fd);
	}
	return r;
}
int cuStreamCreate(void **s, unsigned flags)
{
	CALL("%u", flags);
	IN_CONTEXT;
	*s = malloc(1);
	return flags == 1 ? OK : INVALID;
}
int cuStreamDestroy_v2(void *s)
{
	CALL("");
	IN_CONTEXT;
	free(s);
	return OK;
}
int cuStreamSynchronize(void *s)
{
	CALL("%s", s ? "" : "default");
	IN_CONTEXT;
	return OK;
}
int cuStreamWaitEvent(void *s, void *e, unsigned flags)
{
	CALL("%u", flags);
	IN_CONTEXT;
	return s && e ? OK : BAD_HANDLE;
}
int cuMemcpyDtoDAsync_v2(ptr d, ptr s, size_t n, void *stream)
{
	CALL("%zu", n);
	IN_CONTEXT;
	if (!stream || !covered(d, n) || !covered(s, n))
		return INVALID;
	memmove((void *)d, (void *)s, n);
	return OK;
}
int cuMemcpyHtoDAsync_v2(ptr d, const void *s, size_t n, void *stream)
{
	CALL("%zu", n);
	IN_CONTEXT;
	if (!stream || !covered(d, n))
		return INVALID;
	memcpy((void *)d, s, n);
	return OK;
}
int cuMemcpyDtoHAsync_v2(void *d, ptr s, size_t n, void *stream)
{
	CALL("%zu", n);
	IN_CONTEXT;
	if (!stream || !covered(s, n))
		return INVALID;
	memcpy(d, (void *)s, n);
	return OK;
}
int cuEventCreate(void **e, unsigned flags)
{
	CALL("%u", flags);
	IN_CONTEXT;
	struct event *v = calloc(1, sizeof(*v));
	v->flags = (int)flags;
	*e = v;
	return (flags & 4) && !(flags & 2) ? INVALID : OK; /* events of two processes have no time */
}
int cuEventDestroy_v2(void *e)
{
	CALL("");
	IN_CONTEXT;
	free(e);
	return OK;
}
int cuEventRecord(void *e, void *s)
{
	CALL("");
	IN_CONTEXT;
	struct event *v = e;
	clock_gettime(CLOCK_MONOTONIC, &v->at);
	v->recorded = 1;
	return s ? OK : BAD_HANDLE;
}
int cuEventQuery(void *e)
{
	CALL("");
	IN_CONTEXT;
	return e ? OK : BAD_HANDLE;
}
int cuEventSynchronize(void *e)
{
	CALL("");
	IN_CONTEXT;
	return e ? OK : BAD_HANDLE;
}
int cuEventElapsedTime(float *ms, void *from, void *to)
{
	CALL("");
	IN_CONTEXT;
	struct event *a = from, *b = to;
	if (!a->recorded || !b->recorded || (a->flags | b->flags) & 2)
		return BAD_HANDLE;
	*ms = (float)((b->at.tv_sec - a->at.tv_sec) * 1e3 + (b->at.tv_nsec - a->at.tv_nsec) / 1e6);
	return OK;
}
int cuIpcGetEventHandle(ipc *h, void *e)
{
	CALL("");
	IN_CONTEXT;
	memset(h, 0, sizeof(*h));
	struct event *v = e;
	return v->flags & 4 ? OK : INVALID;
}
int cuIpcOpenEventHandle(void **e, ipc h)
{
	CALL("");
	IN_CONTEXT;
	(void)h;
	*e = calloc(1, sizeof(struct event));
	return OK;
}
