/* Settings, counters, injected faults, broken rules, and the report that the tests read. */
#include "shim.h"

pthread_mutex_t cudashim_lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
int cudashim_cc_major = 9, cudashim_cc_minor = 0, cudashim_fill = -1;
size_t cudashim_total_bytes;

typedef struct { const char *name; long count; } Counter;
static Counter calls[512], notes[128];
static int n_calls, n_notes;
static char *violations[200];
static int n_violations;
static char order[65536]; /* one letter a call, in the order they came: see cudashim_event */
static int n_order;
static __thread int last_error;
static int lost;
typedef struct { char function[96]; long skip, times; int code, stays; } Fault;
static Fault faults[4];
static int ready;

/* CUDASHIM_CC=9.0, CUDASHIM_TOTAL_MB, CUDASHIM_FILL=255 (new memory is full of NaN),
 * CUDASHIM_FAULT=function:skip:times:code:stays (function: a CUDA name, "kernel" or "gemm"). */
void cudashim_setup(void) {
    LOCK;
    if (!ready) {
        ready = 1;
        const char *total = getenv("CUDASHIM_TOTAL_MB"), *cc = getenv("CUDASHIM_CC"), *fill = getenv("CUDASHIM_FILL");
        const char *injected = getenv("CUDASHIM_FAULT");
        cudashim_total_bytes = (total ? strtoull(total, 0, 10) : 143771ull) << 20;
        if (cc) sscanf(cc, "%d.%d", &cudashim_cc_major, &cudashim_cc_minor);
        if (fill) cudashim_fill = (int)strtol(fill, 0, 0);
        if (injected)
            sscanf(injected, "%95[^:]:%ld:%ld:%d:%d", faults->function, &faults->skip, &faults->times, &faults->code, &faults->stays);
    }
    UNLOCK;
}

static void bump(Counter *table, int *n, int max, const char *name) {
    for (int i = 0; i < *n; i++)
        if (!strcmp(table[i].name, name)) { table[i].count++; return; }
    if (*n < max) { table[*n].name = strdup(name); table[(*n)++].count = 1; }
}

void cudashim_note(const char *what) { LOCK; bump(notes, &n_notes, 128, what); UNLOCK; }

void cudashim_violation(const char *format, ...) {
    char text[600];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    LOCK;
    int seen = 0;
    for (int i = 0; i < n_violations; i++) seen |= !strcmp(violations[i], text);
    if (!seen && n_violations < 200) violations[n_violations++] = strdup(text);
    UNLOCK;
}

/* U: upload from pinned memory, D: download to it, G: a recorded graph, R: event recorded, W: host waits for an event,
 * S: host waits for a stream or the device. */
void cudashim_event(char kind) { LOCK; if (n_order < (int)sizeof order - 1) order[n_order++] = kind; UNLOCK; }

int cudashim_done(int code) { if (code) last_error = code; return code; }
int cudashim_lost(void) { return lost; }

int cudashim_enter(const char *function) {
    cudashim_setup();
    LOCK;
    bump(calls, &n_calls, 512, function);
    int code = lost;
    for (Fault *fault = faults; fault < faults + 4; fault++)
        if (fault->times && !strcmp(fault->function, function) && fault->skip-- <= 0) {
            code = fault->code;
            fault->times--;
            if (fault->stays) lost = fault->code;
        }
    UNLOCK;
    return code;
}

/* For tests that run in the process: fail the calls of *function* after *skip* of them, *times* times. Up to four. */
void cudashim_fault(const char *function, long skip, long times, int code, int stays) {
    LOCK;
    Fault *fault = faults;
    while (fault->times && fault < faults + 3) fault++;
    *fault = (Fault){"", skip, times, code, stays};
    snprintf(fault->function, sizeof fault->function, "%s", function);
    UNLOCK;
}

/* The device works again. */
void cudashim_heal(void) { LOCK; lost = 0; memset(faults, 0, sizeof faults); last_error = 0; UNLOCK; }

int cudaGetLastError(void) { int e = lost ? lost : last_error; last_error = 0; return e; }
int cudaPeekAtLastError(void) { return lost ? lost : last_error; }

/* --- REPORT ------------------------------------------------------------------------------------------------------- */

static void text(FILE *file, const char *s) {
    fputc('"', file);
    for (; *s; s++) {
        if (*s == '"' || *s == '\\') fputc('\\', file);
        if ((unsigned char)*s >= 32) fputc(*s, file);
    }
    fputc('"', file);
}

static void table(FILE *file, const char *name, Counter *rows, int n) {
    fprintf(file, ", \"%s\": {", name);
    for (int i = 0, written = 0; i < n; i++)
        if (rows[i].count) {
            if (written++) fputs(", ", file);
            text(file, rows[i].name);
            fprintf(file, ": %ld", rows[i].count);
        }
    fputc('}', file);
}

/* Write what happened since the last reset, and what is alive now, as one JSON object. */
void cudashim_report(const char *path) {
    FILE *file = fopen(path, "w");
    if (!file) return;
    LOCK;
    fprintf(file, "{\"order\": \"%.*s\"", n_order, order);
    table(file, "calls", calls, n_calls);
    table(file, "notes", notes, n_notes);
    fprintf(file, ", \"violations\": [");
    for (int i = 0; i < n_violations; i++) { if (i) fputs(", ", file); text(file, violations[i]); }
    fputc(']', file);
    cudashim_report_memory(file);
    cudashim_report_streams(file);
    cudashim_report_kernels(file);
    fprintf(file, "}\n");
    UNLOCK;
    fclose(file);
}

void cudashim_reset(void) {
    LOCK;
    for (int i = 0; i < n_calls; i++) calls[i].count = 0;
    for (int i = 0; i < n_notes; i++) notes[i].count = 0;
    n_violations = n_order = 0;
    cudashim_reset_memory();
    cudashim_reset_streams();
    cudashim_reset_kernels();
    UNLOCK;
}

/* CUDASHIM_REPORT=FILE: the report of the whole process, for workers that run on their own. */
__attribute__((destructor)) static void at_exit(void) {
    const char *path = getenv("CUDASHIM_REPORT");
    if (path && ready) cudashim_report(path);
}
