/* Streams, events, capture and recorded graphs.
 *
 * Everything finishes at once, so a wait never blocks; but an upload's source has to stay as it was until the host has
 * waited for the upload, which is checked when it does. */
#include "shim.h"

enum { GRAPH = 0x64A94 };
typedef struct { int magic; Node *nodes; size_t n, cap; } Graph;
typedef struct { unsigned flags; Graph *capture; int invalid; } Stream;
typedef struct { unsigned flags; int recorded, captured; void *stream; long at; } Event;
typedef struct { void *stream; const void *from; size_t bytes; uint8_t *was; long at; } Upload;

static Stream *streams[256];
static Event *events[65536];
static Upload *uploads;
static size_t n_uploads, cap_uploads;
static int n_streams, n_events, n_capturing;
static long graphs_live, graph_launches, captures, clock_;
static long recorded_nodes[5]; /* by Kind, of all captures since the reset */

static int real(void *stream) { return (uintptr_t)stream > 2; } /* 0, 1 and 2 name the default streams */

int cudashim_stream_exists(void *stream) {
    if (!real(stream)) return 1;
    LOCK;
    int found = 0;
    for (int i = 0; i < n_streams && !found; i++) found = streams[i] == stream;
    UNLOCK;
    if (!found) cudashim_violation("a call on a stream that doesn't exist");
    return found;
}

static Graph *capturing(void *stream) { return real(stream) ? ((Stream *)stream)->capture : 0; }

int cudashim_forbidden(const char *function) {
    if (!n_capturing) return OK;
    for (int i = 0; i < n_streams; i++) if (streams[i]->capture) streams[i]->invalid = 1;
    if (!cudashim_lost()) cudashim_violation("%s while a stream is capturing", function);
    return CAPTURE_UNSUPPORTED;
}

int cudashim_on_stream(const char *function, void *stream, Node node) {
    if (!cudashim_stream_exists(stream)) return -INVALID_HANDLE;
    Graph *graph = capturing(stream);
    if (!graph) return 0;
    if (((Stream *)stream)->invalid) return -CAPTURE_INVALIDATED;
    LOCK;
    if (graph->n == graph->cap) graph->nodes = realloc(graph->nodes, (graph->cap = graph->cap * 2 + 64) * sizeof *graph->nodes);
    graph->nodes[graph->n++] = node;
    UNLOCK;
    return 1;
}

int cudashim_gemm(void *stream) { int r = cudashim_on_stream("gemm", stream, (Node){GEMM}); return r < 0 ? -r : OK; }

/* --- uploads that the host hasn't waited for ---------------------------------------------------------------------- */

void cudashim_pending(void *stream, const void *from, size_t bytes) {
    if (!bytes || bytes > (64u << 20)) return;
    uint8_t *was = malloc(bytes);
    memcpy(was, from, bytes);
    LOCK;
    if (n_uploads == cap_uploads) uploads = realloc(uploads, (cap_uploads = cap_uploads * 2 + 64) * sizeof *uploads);
    uploads[n_uploads++] = (Upload){stream, from, bytes, was, ++clock_};
    UNLOCK;
}

/* The host has waited for *stream* (0: for all of them) up to *at*. */
static void waited(void *stream, long at) {
    LOCK;
    size_t kept = 0;
    for (size_t i = 0; i < n_uploads; i++) {
        Upload *u = &uploads[i];
        if ((stream && u->stream != stream) || u->at > at) { uploads[kept++] = *u; continue; }
        if (!strcmp(cudashim_where(u->from), "pinned") && memcmp(u->was, u->from, u->bytes))
            cudashim_violation("host memory changed while its upload was still queued");
        free(u->was);
    }
    n_uploads = kept;
    UNLOCK;
}

/* --- streams ------------------------------------------------------------------------------------------------------ */

int cudaStreamCreateWithFlags(void **out, unsigned flags) {
    ENTER;
    Stream *stream = calloc(1, sizeof *stream);
    stream->flags = flags;
    LOCK; streams[n_streams++] = stream; UNLOCK;
    *out = stream;
    return OK;
}
int cudaStreamCreate(void **out) { return cudaStreamCreateWithFlags(out, 0); }

int cudaStreamDestroy(void *stream) {
    ENTER;
    if (!real(stream) || !cudashim_stream_exists(stream)) return cudashim_done(INVALID_HANDLE);
    LOCK;
    for (int i = 0; i < n_streams; i++) if (streams[i] == stream) { streams[i] = streams[--n_streams]; break; }
    if (((Stream *)stream)->capture) n_capturing--;
    UNLOCK;
    free(stream);
    return OK;
}

int cudaStreamSynchronize(void *stream) {
    ENTER;
    if (!cudashim_stream_exists(stream)) return cudashim_done(INVALID_HANDLE);
    if (capturing(stream)) return cudashim_done(cudashim_forbidden(__func__));
    cudashim_event('S');
    waited(stream, clock_);
    return OK;
}

int cudaDeviceSynchronize(void) {
    ENTER;
    int error = cudashim_forbidden(__func__);
    if (!error) { cudashim_event('S'); waited(0, clock_); }
    return cudashim_done(error);
}

int cudaStreamQuery(void *stream) {
    ENTER;
    if (!cudashim_stream_exists(stream)) return cudashim_done(INVALID_HANDLE);
    return capturing(stream) ? cudashim_done(cudashim_forbidden(__func__)) : OK;
}

int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) { ENTER; return cudashim_done(cudashim_stream_exists(stream) ? OK : INVALID_HANDLE); }

int cudaStreamIsCapturing(void *stream, int *status) {
    ENTER;
    if (!cudashim_stream_exists(stream)) return cudashim_done(INVALID_HANDLE);
    *status = capturing(stream) ? (((Stream *)stream)->invalid ? 2 : 1) : 0;
    return OK;
}

/* --- capture and graphs ------------------------------------------------------------------------------------------- */

int cudaStreamBeginCapture(void *stream, int mode) {
    ENTER;
    if (!cudashim_stream_exists(stream)) return cudashim_done(INVALID_HANDLE);
    if (!real(stream)) { cudashim_violation("capture of the default stream"); return cudashim_done(CAPTURE_UNSUPPORTED); }
    if (capturing(stream)) { cudashim_violation("capture of a capturing stream"); return cudashim_done(INVALID_VALUE); }
    Graph *graph = calloc(1, sizeof *graph);
    graph->magic = GRAPH;
    LOCK;
    ((Stream *)stream)->capture = graph;
    ((Stream *)stream)->invalid = 0;
    n_capturing++;
    graphs_live++;
    UNLOCK;
    return OK;
}

int cudaStreamEndCapture(void *p, void **graph) {
    ENTER;
    if (!cudashim_stream_exists(p)) return cudashim_done(INVALID_HANDLE);
    Stream *stream = p;
    if (!real(p) || !stream->capture) { cudashim_violation("end of a capture that wasn't begun"); return cudashim_done(CAPTURE_UNMATCHED); }
    Graph *done = stream->capture;
    stream->capture = 0;
    LOCK;
    n_capturing--;
    for (size_t i = 0; i < done->n; i++) recorded_nodes[done->nodes[i].kind]++;
    captures++;
    UNLOCK;
    *graph = stream->invalid ? 0 : done;
    return stream->invalid ? cudashim_done(CAPTURE_INVALIDATED) : OK;
}

int cudaGraphInstantiate(void **out, void *p, unsigned long long flags) {
    ENTER;
    Graph *graph = p;
    if (!graph || graph->magic != GRAPH) return cudashim_done(INVALID_VALUE);
    Graph *made = malloc(sizeof *made);
    *made = *graph;
    made->nodes = malloc(graph->n * sizeof(Node) + 1);
    memcpy(made->nodes, graph->nodes, graph->n * sizeof(Node));
    *out = made;
    LOCK; graphs_live++; UNLOCK;
    return OK;
}

static int destroy(Graph *graph) {
    if (!graph || graph->magic != GRAPH) { cudashim_violation("destruction of a graph that doesn't exist"); return INVALID_VALUE; }
    graph->magic = 0;
    free(graph->nodes);
    free(graph);
    LOCK; graphs_live--; UNLOCK;
    return OK;
}
int cudaGraphDestroy(void *graph) { ENTER; return cudashim_done(destroy(graph)); }
int cudaGraphExecDestroy(void *graph) { ENTER; return cudashim_done(destroy(graph)); }

int cudaGraphLaunch(void *p, void *stream) {
    ENTER;
    Graph *graph = p;
    if (!cudashim_stream_exists(stream)) return cudashim_done(INVALID_HANDLE);
    if (!graph || graph->magic != GRAPH) { cudashim_violation("launch of a graph that doesn't exist"); return cudashim_done(INVALID_VALUE); }
    LOCK; graph_launches++; UNLOCK;
    cudashim_event('G');
    for (size_t i = 0; i < graph->n; i++) {
        Node *node = &graph->nodes[i];
        int error = OK;
        if (node->kind == COPY) error = cudashim_copy("a recorded copy", node->to, node->from, node->bytes, node->value);
        if (node->kind == SET) error = cudashim_set("a recorded memset", node->to, node->value, node->bytes);
        if (error) return cudashim_done(error);
    }
    return OK;
}

/* --- events ------------------------------------------------------------------------------------------------------- */

static Event *event_of(const char *function, void *p) {
    Event *found = 0;
    LOCK;
    for (int i = 0; i < n_events && !found; i++) if (events[i] == p) found = p;
    UNLOCK;
    if (!found) cudashim_violation("%s of an event that doesn't exist", function);
    return found;
}

int cudaEventCreateWithFlags(void **out, unsigned flags) {
    ENTER;
    Event *event = calloc(1, sizeof *event);
    event->flags = flags;
    LOCK; if (n_events < 65536) events[n_events++] = event; UNLOCK;
    *out = event;
    return OK;
}
int cudaEventCreate(void **out) { return cudaEventCreateWithFlags(out, 0); }

int cudaEventDestroy(void *p) {
    ENTER;
    if (!event_of(__func__, p)) return cudashim_done(INVALID_HANDLE);
    LOCK;
    for (int i = 0; i < n_events; i++) if (events[i] == p) { events[i] = events[--n_events]; break; }
    UNLOCK;
    free(p);
    return OK;
}

int cudaEventRecordWithFlags(void *p, void *stream, unsigned flags) {
    ENTER;
    Event *event = event_of(__func__, p);
    if (!event || !cudashim_stream_exists(stream)) return cudashim_done(INVALID_HANDLE);
    LOCK;
    event->recorded = 1;
    event->captured = capturing(stream) != 0;
    event->stream = stream;
    event->at = clock_;
    UNLOCK;
    cudashim_event('R');
    return OK;
}
int cudaEventRecord(void *event, void *stream) { return cudaEventRecordWithFlags(event, stream, 0); }

int cudaEventSynchronize(void *p) {
    ENTER;
    Event *event = event_of(__func__, p);
    if (!event) return cudashim_done(INVALID_HANDLE);
    if (event->captured) return cudashim_done(cudashim_forbidden(__func__));
    if (!event->recorded) cudashim_violation("a wait for an event that was never recorded");
    cudashim_event('W');
    waited(event->stream, event->at);
    return OK;
}
int cudaEventElapsedTime(float *ms, void *a, void *b) { ENTER; *ms = 0.01f; return OK; }
int cudaEventQuery(void *p) { ENTER; return event_of(__func__, p) ? OK : cudashim_done(INVALID_HANDLE); }

void cudashim_report_streams(FILE *file) {
    fprintf(file, ", \"streams\": %d, \"events\": %d, \"graphs_live\": %ld, \"graph_launches\": %ld, \"captures\": %ld", n_streams, n_events, graphs_live, graph_launches, captures);
    fprintf(file, ", \"recorded\": {\"kernels\": %ld, \"products\": %ld, \"copies\": %ld, \"sets\": %ld, \"host\": %ld}",
            recorded_nodes[KERNEL], recorded_nodes[GEMM], recorded_nodes[COPY], recorded_nodes[SET], recorded_nodes[HOST]);
}

void cudashim_reset_streams(void) { graph_launches = captures = 0; memset(recorded_nodes, 0, sizeof recorded_nodes); }
