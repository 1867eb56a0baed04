/* Device and pinned memory, copies between them.
 *
 * "Device" memory is one file mapped twice. Programs get addresses in a mapping without any access, so host code that
 * touches device memory dies of SIGSEGV; the copies below use the other mapping. Every copy is checked against live
 * blocks, device and pinned. */
#include "shim.h"

typedef struct { size_t offset, size; } Block;
typedef struct { uint8_t *p; size_t size; } Pinned;
static uint8_t *base, *alias; /* without access; with access */
static Block *blocks;         /* live blocks, by offset */
static size_t n_blocks, cap_blocks, live_bytes, peak_bytes, uploaded_bytes;
static Pinned pinned[4096];
static int n_pinned;
static int memfd;

static void map(void) {
    cudashim_setup();
    LOCK;
    if (!base) {
        memfd = memfd_create("cudashim", 0);
        if (memfd < 0 || ftruncate(memfd, (off_t)cudashim_total_bytes)) { perror("cudashim: memfd"); abort(); }
        base = mmap(0, cudashim_total_bytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, memfd, 0);
        alias = mmap(0, cudashim_total_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memfd, 0);
        if (base == MAP_FAILED || alias == MAP_FAILED) { perror("cudashim: mmap"); abort(); }
    }
    UNLOCK;
}

int cudashim_is_device(const void *p) { return base && (uint8_t *)p >= base && (uint8_t *)p < base + cudashim_total_bytes; }

static Block *block_of(const void *p) {
    if (!cudashim_is_device(p)) return 0;
    size_t offset = (uint8_t *)p - base, low = 0, high = n_blocks;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[middle].offset <= offset) low = middle + 1; else high = middle;
    }
    if (!low) return 0;
    Block *block = &blocks[low - 1];
    return offset < block->offset + (block->size ? block->size : 1) ? block : 0;
}

static Pinned *pinned_of(const void *p) {
    for (int i = 0; i < n_pinned; i++)
        if ((uint8_t *)p >= pinned[i].p && (uint8_t *)p < pinned[i].p + pinned[i].size) return &pinned[i];
    return 0;
}

const char *cudashim_where(const void *p) {
    if (cudashim_is_device(p)) return "device";
    LOCK;
    Pinned *found = pinned_of(p);
    UNLOCK;
    return found ? "pinned" : "pageable";
}

static size_t whole(size_t size) { return (size + 511) & ~(size_t)511; }

/* First fit. */
static int allocate(void **out, size_t size) {
    if (!out) return INVALID_VALUE;
    if (!size) { *out = 0; return OK; }
    map();
    size_t need = whole(size), at = 0, i;
    LOCK;
    for (i = 0; i < n_blocks && blocks[i].offset - at < need; i++) at = blocks[i].offset + whole(blocks[i].size);
    if (live_bytes + need > cudashim_total_bytes || (i == n_blocks && at + need > cudashim_total_bytes)) {
        UNLOCK;
        return OUT_OF_MEMORY;
    }
    if (n_blocks == cap_blocks) blocks = realloc(blocks, (cap_blocks = cap_blocks * 2 + 1024) * sizeof *blocks);
    memmove(blocks + i + 1, blocks + i, (n_blocks - i) * sizeof *blocks);
    blocks[i] = (Block){at, size};
    n_blocks++;
    live_bytes += need;
    if (live_bytes > peak_bytes) peak_bytes = live_bytes;
    *out = base + at;
    UNLOCK;
    if (cudashim_fill >= 0) memset(alias + at, cudashim_fill, size);
    return OK;
}

static int release(void *p) {
    if (!p) return OK;
    LOCK;
    Block *block = block_of(p);
    if (!block || base + block->offset != (uint8_t *)p) {
        UNLOCK;
        cudashim_violation("free of %s", block ? "a pointer inside a device block" : "memory that is not a live device block");
        return INVALID_VALUE;
    }
    size_t need = whole(block->size);
    size_t low = (block->offset + 4095) & ~(size_t)4095, high = (block->offset + need) & ~(size_t)4095;
    live_bytes -= need;
    if (high > low) fallocate(memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)low, (off_t)(high - low));
    memmove(block, block + 1, (blocks + n_blocks - block - 1) * sizeof *block);
    n_blocks--;
    UNLOCK;
    return OK;
}

static int pin(void **out, size_t size) {
    if (!out) return INVALID_VALUE;
    cudashim_setup();
    uint8_t *p = mmap(0, size ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return OUT_OF_MEMORY;
    if (cudashim_fill >= 0) memset(p, cudashim_fill, size);
    LOCK;
    pinned[n_pinned++] = (Pinned){p, size};
    UNLOCK;
    *out = p;
    return OK;
}

static int unpin(void *p) {
    if (!p) return OK;
    LOCK;
    for (int i = 0; i < n_pinned; i++)
        if (pinned[i].p == p) {
            munmap(p, pinned[i].size ? pinned[i].size : 1);
            pinned[i] = pinned[--n_pinned];
            UNLOCK;
            return OK;
        }
    UNLOCK;
    cudashim_violation("free of memory that is not pinned");
    return INVALID_VALUE;
}

/* The address that a copy may use; *beyond: the range leaves its live block. */
static void *reach(const void *p, size_t bytes, int *beyond) {
    void *result = (void *)p;
    LOCK;
    if (cudashim_is_device(p)) {
        Block *block = block_of(p);
        size_t offset = (uint8_t *)p - base;
        *beyond |= !block || offset + bytes > block->offset + block->size;
        result = alias + offset;
    } else {
        Pinned *block = pinned_of(p);
        *beyond |= block && (uint8_t *)p + bytes > block->p + block->size;
    }
    UNLOCK;
    return result;
}

int cudashim_copy(const char *function, void *to, const void *from, size_t bytes, int kind) {
    if (!bytes) return OK;
    int beyond = 0;
    void *target = reach(to, bytes, &beyond), *source = reach(from, bytes, &beyond);
    const char *there = cudashim_where(to), *here = cudashim_where(from);
    if (beyond) {
        cudashim_violation("%s of %zu bytes beyond a live block (%s to %s)", function, bytes, here, there);
        return INVALID_VALUE;
    }
    static const int onto[] = {0, 1, 0, 1}, off[] = {0, 0, 1, 1}; /* host, up, down, device: which side is the device */
    if (kind >= 0 && kind < 4 && (onto[kind] != cudashim_is_device(to) || off[kind] != cudashim_is_device(from)))
        cudashim_violation("%s kind %d but %s to %s", function, kind, here, there);
    memmove(target, source, bytes);
    return OK;
}

int cudashim_set(const char *function, void *p, int value, size_t bytes) {
    int beyond = 0;
    void *target = reach(p, bytes, &beyond);
    if (beyond) { cudashim_violation("%s of %zu bytes beyond a live block", function, bytes); return INVALID_VALUE; }
    memset(target, value, bytes);
    return OK;
}

/* Count a copy's direction, and uploads into the order of calls. */
static void tell(const char *function, void *to, const void *from, size_t bytes) {
    const char *here = cudashim_where(from), *there = cudashim_where(to);
    char what[96];
    snprintf(what, sizeof what, "%s %s to %s", function, here, there);
    cudashim_note(what);
    LOCK;
    if (cudashim_is_device(to) && !cudashim_is_device(from)) uploaded_bytes += bytes;
    UNLOCK;
    if (!strcmp(here, "pinned") && cudashim_is_device(to)) cudashim_event('U');
    if (!strcmp(there, "pinned") && cudashim_is_device(from)) cudashim_event('D');
}

/* --- API ---------------------------------------------------------------------------------------------------------- */

/* Not while a stream captures. */
#define ALONE do { int e = cudashim_forbidden(__func__); if (e) return cudashim_done(e); } while (0)

int cudaMalloc(void **p, size_t n) { ENTER; ALONE; return cudashim_done(allocate(p, n)); }
int cudaFree(void *p) { ENTER; if (!p) return OK; ALONE; return cudashim_done(release(p)); }
int cudaHostAlloc(void **p, size_t n, unsigned flags) { ENTER; ALONE; return cudashim_done(pin(p, n)); }
int cudaMallocHost(void **p, size_t n) { ENTER; ALONE; return cudashim_done(pin(p, n)); }
int cudaFreeHost(void *p) { ENTER; ALONE; return cudashim_done(unpin(p)); }
int cudaMallocAsync(void **p, size_t n, void *s) { ENTER; return cudashim_done(cudashim_stream_exists(s) ? allocate(p, n) : INVALID_HANDLE); }
int cudaMallocFromPoolAsync(void **p, size_t n, void *pool, void *s) { ENTER; return cudashim_done(cudashim_stream_exists(s) ? allocate(p, n) : INVALID_HANDLE); }
int cudaFreeAsync(void *p, void *s) { ENTER; return cudashim_done(cudashim_stream_exists(s) ? release(p) : INVALID_HANDLE); }
int cudaMemPoolCreate(void **pool, const void *properties) { ENTER; *pool = calloc(1, 64); return OK; }
int cudaMemPoolDestroy(void *pool) { ENTER; free(pool); return OK; }
int cudaMemPoolGetAttribute(void *pool, int attribute, void *value) { ENTER; *(uint64_t *)value = 0; return OK; }
int cudaMemPoolSetAttribute(void *pool, int attribute, void *value) { ENTER; return OK; }
int cudaMemPoolTrimTo(void *pool, size_t n) { ENTER; return OK; }

int cudaMemGetInfo(size_t *available, size_t *total) {
    ENTER;
    *total = cudashim_total_bytes;
    *available = cudashim_total_bytes - live_bytes;
    return OK;
}

typedef struct { int type, device; void *device_pointer, *host_pointer; long reserved[8]; } PointerAttributes;

int cudaPointerGetAttributes(PointerAttributes *a, const void *p) {
    ENTER;
    memset(a, 0, sizeof *a);
    a->device = -2;
    LOCK;
    if (block_of(p)) *a = (PointerAttributes){2, 0, (void *)p, 0};
    else if (pinned_of(p)) *a = (PointerAttributes){1, 0, (void *)p, (void *)p};
    UNLOCK;
    return OK;
}

int cudaMemcpy(void *to, const void *from, size_t n, int kind) {
    ENTER;
    ALONE;
    tell(__func__, to, from, n);
    return cudashim_done(cudashim_copy(__func__, to, from, n, kind));
}

int cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *stream) {
    ENTER;
    tell(__func__, to, from, n);
    int recorded = cudashim_on_stream(__func__, stream, (Node){COPY, to, from, n, kind});
    if (recorded < 0) return cudashim_done(-recorded);
    const char *here = cudashim_where(from), *there = cudashim_where(to);
    if (recorded) {
        /* A replay would read or write host memory whose owner may have given it back. */
        if (strcmp(here, "device") || strcmp(there, "device")) cudashim_violation("a recorded launch copies %s memory to %s", here, there);
        return OK;
    }
    if (!strcmp(here, "pinned") && cudashim_is_device(to)) cudashim_pending(stream, from, n);
    return cudashim_done(cudashim_copy(__func__, to, from, n, kind));
}

int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind, void *stream) {
    ENTER;
    tell(__func__, to, from, width * height);
    for (size_t i = 0; i < height; i++) {
        Node node = {COPY, (char *)to + i * to_pitch, (const char *)from + i * from_pitch, width, kind};
        int recorded = cudashim_on_stream(__func__, stream, node);
        int error = recorded ? 0 : cudashim_copy(__func__, node.to, node.from, width, kind);
        if (recorded < 0 || error) return cudashim_done(recorded < 0 ? -recorded : error);
    }
    return OK;
}

int cudaMemset(void *p, int value, size_t n) { ENTER; ALONE; return cudashim_done(cudashim_set(__func__, p, value, n)); }

int cudaMemsetAsync(void *p, int value, size_t n, void *stream) {
    ENTER;
    int recorded = cudashim_on_stream(__func__, stream, (Node){SET, p, 0, n, value});
    return cudashim_done(recorded < 0 ? -recorded : recorded ? OK : cudashim_set(__func__, p, value, n));
}

int cudaMemcpyFromSymbol(void *to, const void *symbol, size_t n, size_t offset, int kind) { ENTER; memset(to, 0, n); return OK; }

void cudashim_report_memory(FILE *file) {
    fprintf(file, ", \"device_blocks\": %zu, \"device_bytes\": %zu, \"device_peak\": %zu, \"pinned_blocks\": %d, \"uploaded_bytes\": %zu",
            n_blocks, live_bytes, peak_bytes, n_pinned, uploaded_bytes);
}

void cudashim_reset_memory(void) { peak_bytes = live_bytes; uploaded_bytes = 0; }
