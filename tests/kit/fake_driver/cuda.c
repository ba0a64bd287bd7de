/* libcuda: initialisation, devices, contexts, streams and events.

   All that is enqueued is done at once, so a wait has nothing to wait for. */
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    int device, ordinal;
} Context;
typedef struct {
    int number;
    double recorded_ms; /* when what was enqueued before it is done */
} Event;
typedef struct {
    int number, device;
} Stream;

static int visible[MOST_DEVICES], num_visible = -1;
static Context contexts[MOST_DEVICES];
static _Thread_local Context *stack[32];
static _Thread_local int depth;
static int num_streams, num_events;
static double busy_until_ms; /* the card that this process steps on */

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

static void sleep_until(double ms) {
    while (now_ms() < ms) usleep(1e3 * (ms - now_ms()) + 1);
}

int fake_current(void) { return depth ? stack[depth - 1]->device : -1; }

int fake_stream(const void *stream) { return stream ? ((const Stream *)stream)->number : 0; }

int fake_visible(int ordinal) {
    return ordinal >= 0 && ordinal < num_visible ? visible[ordinal] : -1;
}

/* Read once, as a driver does: numbers alone, up to the first that is none. */
EXPORT int cuInit(unsigned flags) {
    BEGIN();
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    LOG("\"flags\": %u, \"visible\": \"%s\"", flags, text ? text : "all");
    if (num_visible < 0) {
        num_visible = 0;
        for (int i = 0; !text && i < fake_devices; i++) visible[num_visible++] = i;
        for (char *end; text && *text && num_visible < MOST_DEVICES; text = end + (*end == ',')) {
            long number = strtol(text, &end, 10);
            if (end == text || number < 0 || number >= fake_devices) break;
            visible[num_visible++] = (int)number;
        }
    }
    return num_visible ? OK : NO_DEVICE;
}

EXPORT int cuDriverGetVersion(int *version) {
    BEGIN();
    *version = fake_cuda_version;
    LOG("\"version\": %d", *version);
    return OK;
}

EXPORT int cuDeviceGetCount(int *count) {
    BEGIN();
    if (num_visible < 0) return NOT_INITIALIZED;
    *count = num_visible;
    LOG("\"count\": %d", *count);
    return OK;
}

EXPORT int cuDeviceGet(int *device, int ordinal) {
    BEGIN();
    if (num_visible < 0) return NOT_INITIALIZED;
    if (fake_visible(ordinal) < 0) return INVALID_DEVICE;
    *device = ordinal;
    LOG("\"ordinal\": %d", ordinal);
    return OK;
}

EXPORT int cuDeviceGetName(char *name, int size, int device) {
    BEGIN_ON(fake_visible(device));
    snprintf(name, size, "%s", fake_card->name);
    LOG("\"of\": %d", device);
    return OK;
}

EXPORT int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    BEGIN_ON(fake_visible(device));
    memset(uuid, 0x10 + fake_visible(device), 16);
    LOG("\"of\": %d", device);
    return OK;
}

EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    BEGIN_ON(fake_visible(device));
    *bytes = fake_card->mib << 20;
    LOG("\"of\": %d", device);
    return OK;
}

EXPORT int cuDeviceGetPCIBusId(char *id, int size, int device) {
    BEGIN_ON(fake_visible(device));
    snprintf(id, size, "0000:%02x:00.0", 0x45 + fake_visible(device));
    LOG("\"of\": %d", device);
    return OK;
}

/* By the numbers of CUdevice_attribute; what is not here is 0, which is "no". */
static int attribute_of(int attribute, int device) {
    const Card *card = fake_card;
    switch (attribute) {
        case 1: case 2: case 3: return 1024;        /* threads of a block, and by dimension */
        case 4: return 64;
        case 5: return 2147483647;                  /* blocks of a grid */
        case 6: case 7: return 65535;
        case 8: return 49152;                       /* shared memory without an opt-in */
        case 9: return 65536;                       /* constant memory */
        case 10: return 32;                         /* threads of a warp */
        case 11: return 2147483647;                 /* pitch of a copy */
        case 12: case 82: return 65536;             /* registers of a block, of a processor */
        case 13: return card->clock_khz;
        case 15: case 19: case 31: case 32: return 1; /* overlap, mapped memory, kernels, ECC */
        case 16: return card->processors;
        case 33: return 0x45 + device;              /* bus */
        case 36: return card->memory_khz;
        case 37: return card->bus_bits;
        case 38: return card->l2;
        case 39: return card->threads_per_processor;
        case 40: return 3;                          /* copy engines */
        case 41: case 78: case 83: case 89: case 95: return 1;
        case 75: return card->major;
        case 76: return card->minor;
        case 81: return card->shared_per_processor;
        case 97: return card->shared_per_block;
        case 102: case 103: return 1;               /* virtual memory, handles of files */
        case 106: return 32;                        /* blocks of a processor */
        case 110: case 116: return 1;               /* RDMA */
        case 111: return 1024;                      /* shared memory the system has of a block */
        case 115: case 119: return 1;               /* pools */
        case 120: return card->major >= 9;          /* clusters */
        default: return 0;
    }
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    BEGIN_ON(fake_visible(device));
    *value = attribute_of(attribute, fake_visible(device));
    LOG("\"of\": %d, \"attribute\": %d, \"value\": %d", device, attribute, *value);
    return OK;
}

EXPORT int cuDeviceCanAccessPeer(int *can, int device, int peer) {
    BEGIN();
    *can = 0;
    LOG("\"of\": %d, \"peer\": %d", device, peer);
    return OK;
}

static int give_context(const char *call, Context **context, int ordinal) {
    int device = fake_visible(ordinal);
    if (device < 0) return INVALID_DEVICE;
    if (fake_is_lost(device)) {
        fake_log(call, device, "\"error\": %d", UNAVAILABLE);
        return UNAVAILABLE;
    }
    contexts[device] = (Context){device, ordinal};
    *context = &contexts[device];
    fake_log(call, device, "");
    return OK;
}

EXPORT int cuDevicePrimaryCtxRetain(Context **context, int device) {
    BEGIN();
    return give_context(__func__, context, device);
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
    BEGIN();
    LOG("\"of\": %d", device);
    return OK;
}

EXPORT int cuCtxPushCurrent_v2(Context *context) {
    BEGIN();
    if (!context || depth == 32) return INVALID_CONTEXT;
    stack[depth++] = context;
    return OK;
}

EXPORT int cuCtxPopCurrent_v2(Context **context) {
    if (!depth) return INVALID_CONTEXT;
    depth--;
    if (context) *context = stack[depth];
    return OK;
}

EXPORT int cuCtxSetCurrent(Context *context) {
    depth = depth ? depth - 1 : 0;
    if (context) stack[depth++] = context;
    return OK;
}

EXPORT int cuCtxGetCurrent(Context **context) {
    *context = depth ? stack[depth - 1] : NULL;
    return OK;
}

EXPORT int cuCtxCreate_v2(Context **context, unsigned flags, int device) {
    BEGIN();
    int status = give_context(__func__, context, device);
    if (status == OK) status = cuCtxPushCurrent_v2(*context);
    return flags || status ? status : OK;
}

EXPORT int cuCtxDestroy_v2(Context *context) {
    LOG("\"of\": %d", context ? context->device : -1);
    return OK;
}

EXPORT int cuCtxDestroy(Context *context) { return cuCtxDestroy_v2(context); }
EXPORT int cuCtxPushCurrent(Context *context) { return cuCtxPushCurrent_v2(context); }
EXPORT int cuCtxPopCurrent(Context **context) { return cuCtxPopCurrent_v2(context); }

EXPORT int cuCtxGetDevice(int *device) {
    if (!depth) return INVALID_CONTEXT;
    *device = stack[depth - 1]->ordinal;
    return OK;
}

EXPORT int cuCtxSynchronize(void) {
    BEGIN();
    LOG("");
    return OK;
}

EXPORT int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    BEGIN();
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    LOG("");
    return OK;
}

EXPORT int cuStreamCreateWithPriority(Stream **stream, unsigned flags, int priority) {
    BEGIN();
    *stream = calloc(1, sizeof **stream);
    (*stream)->number = __atomic_add_fetch(&num_streams, 1, __ATOMIC_RELAXED);
    (*stream)->device = fake_current();
    LOG("\"stream\": %d, \"flags\": %u, \"priority\": %d", (*stream)->number, flags, priority);
    return OK;
}

EXPORT int cuStreamCreate(Stream **stream, unsigned flags) {
    return cuStreamCreateWithPriority(stream, flags, 0);
}

EXPORT int cuStreamDestroy_v2(Stream *stream) {
    LOG("\"stream\": %d", fake_stream(stream));
    free(stream);
    return OK;
}

EXPORT int cuStreamDestroy(Stream *stream) { return cuStreamDestroy_v2(stream); }

EXPORT int cuStreamSynchronize(Stream *stream) {
    BEGIN();
    if (fake_captured >= 0) return CAPTURE_UNSUPPORTED;
    LOG("\"stream\": %d", fake_stream(stream));
    return OK;
}

EXPORT int cuStreamWaitEvent(Stream *stream, Event *event, unsigned flags) {
    BEGIN();
    LOG("\"stream\": %d, \"event\": %d, \"flags\": %u", fake_stream(stream), event->number, flags);
    return OK;
}

EXPORT int cuStreamIsCapturing(Stream *stream, int *status) {
    BEGIN();
    *status = fake_captured >= 0;
    LOG("\"stream\": %d", fake_stream(stream));
    return OK;
}

EXPORT int cuStreamGetCaptureInfo_v2(Stream *stream, int *status, void *id, void *graph,
                                     void *dependencies, void *count) {
    (void)id, (void)graph, (void)dependencies, (void)count;
    return cuStreamIsCapturing(stream, status);
}

EXPORT int cuLaunchHostFunc(Stream *stream, void (*function)(void *), void *given) {
    BEGIN();
    LOG("\"stream\": %d", fake_stream(stream));
    function(given);
    return OK;
}

EXPORT int cuEventCreate(Event **event, unsigned flags) {
    BEGIN();
    *event = calloc(1, sizeof **event);
    (*event)->number = __atomic_add_fetch(&num_events, 1, __ATOMIC_RELAXED);
    LOG("\"event\": %d, \"flags\": %u", (*event)->number, flags);
    return OK;
}

EXPORT int cuEventDestroy(Event *event) {
    LOG("\"event\": %d", event->number);
    free(event);
    return OK;
}

EXPORT int cuEventDestroy_v2(Event *event) { return cuEventDestroy(event); }

EXPORT int cuEventRecord(Event *event, Stream *stream) {
    BEGIN();
    if (busy_until_ms < now_ms()) busy_until_ms = now_ms();
    if (fake_launched) busy_until_ms += fake_step_ms;
    fake_launched = 0;
    event->recorded_ms = busy_until_ms;
    LOG("\"event\": %d, \"stream\": %d", event->number, fake_stream(stream));
    return OK;
}

EXPORT int cuEventSynchronize(Event *event) {
    BEGIN();
    if (fake_captured >= 0) return CAPTURE_UNSUPPORTED;
    LOG("\"event\": %d", event->number);
    sleep_until(event->recorded_ms);
    return OK;
}

EXPORT int cuEventQuery(Event *event) {
    BEGIN();
    LOG("\"event\": %d", event->number);
    return OK;
}

EXPORT int cuEventElapsedTime(float *ms, Event *start, Event *end) {
    BEGIN();
    *ms = (float)(end->recorded_ms - start->recorded_ms);
    LOG("");
    return OK;
}

EXPORT int cuGetErrorName(int error, const char **name) {
    switch (error) {
        case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
        case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
        case UNAVAILABLE: *name = "CUDA_ERROR_DEVICE_UNAVAILABLE"; break;
        case NO_BINARY_FOR_GPU: *name = "CUDA_ERROR_NO_BINARY_FOR_GPU"; break;
        case OUT_OF_RESOURCES: *name = "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"; break;
        case LAUNCH_FAILED: *name = "CUDA_ERROR_LAUNCH_FAILED"; break;
        case NOT_SUPPORTED: *name = "CUDA_ERROR_NOT_SUPPORTED"; break;
        case 214: *name = "CUDA_ERROR_ECC_UNCORRECTABLE"; break;
        case 700: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
        default: *name = "CUDA_ERROR_UNKNOWN";
    }
    return OK;
}

EXPORT int cuGetErrorString(int error, const char **text) {
    switch (error) {
        case OUT_OF_MEMORY: *text = "out of memory"; break;
        case LAUNCH_FAILED: *text = "unspecified launch failure"; break;
        case 700: *text = "an illegal memory access was encountered"; break;
        default: return cuGetErrorName(error, text);
    }
    return OK;
}
