/* What the parts of the stub CUDA runtime share. See ../libraries.py for what the stubs are and what they prove. */
#ifndef CUDASHIM_H
#define CUDASHIM_H
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct { unsigned x, y, z; } dim3;

/* cudaError_t, as far as the stubs return it themselves. */
enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONFIGURATION = 9, INVALID_DEVICE = 101,
    NO_KERNEL_IMAGE = 209, INVALID_HANDLE = 400, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901,
    CAPTURE_UNMATCHED = 903
};

/* ledger.c: one lock, settings from the environment, counters, injected faults, broken rules, the report. */
extern pthread_mutex_t cudashim_lock;
#define LOCK pthread_mutex_lock(&cudashim_lock)
#define UNLOCK pthread_mutex_unlock(&cudashim_lock)
extern int cudashim_cc_major, cudashim_cc_minor; /* compute capability */
extern int cudashim_fill;                        /* byte that new memory is filled with; -1: zeros */
extern size_t cudashim_total_bytes;              /* memory of the device */
void cudashim_setup(void);
int cudashim_enter(const char *function); /* count a call; return an injected error or the one that stays */
int cudashim_done(int code);              /* remember code as the thread's last error and return it */
int cudashim_lost(void);                  /* the error that every call returns since the device was lost, or 0 */
void cudashim_note(const char *what);     /* count something worth seeing */
void cudashim_violation(const char *format, ...); /* a rule of the CUDA API was broken */
void cudashim_event(char kind);           /* append to the order of calls: see REPORT in ledger.c */
/* The first line of most API functions: the injected or lasting error, if there is one. */
#define ENTER do { int entered = cudashim_enter(__func__); if (entered) return cudashim_done(entered); } while (0)

/* memory.c */
int cudashim_is_device(const void *p);
const char *cudashim_where(const void *p); /* "device", "pinned" or "pageable" */
int cudashim_copy(const char *function, void *to, const void *from, size_t bytes, int kind);
int cudashim_set(const char *function, void *p, int value, size_t bytes);
void cudashim_report_memory(FILE *file);
void cudashim_reset_memory(void);

/* streams.c */
typedef enum { KERNEL, GEMM, COPY, SET, HOST } Kind;
typedef struct { Kind kind; void *to; const void *from; size_t bytes; int value; uint8_t *was; } Node;
int cudashim_on_stream(const char *function, void *stream, Node node); /* 1: recorded, 0: execute now, < 0: -error */
int cudashim_forbidden(const char *function); /* a call that CUDA forbids while a stream captures */
int cudashim_stream_exists(void *stream);
void cudashim_pending(void *stream, const void *from, size_t bytes); /* an upload was queued: its source must stay */
void cudashim_report_streams(FILE *file);
void cudashim_reset_streams(void);

/* kernels.c */
void cudashim_report_kernels(FILE *file);
void cudashim_reset_kernels(void);

/* device.c */
int cudashim_attribute(int kind);
int cudashim_shared_memory(void);
const char *cudashim_name(void);
#endif
