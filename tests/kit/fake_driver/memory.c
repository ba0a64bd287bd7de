/* libcuda: memory, copies and fills.

   Memory of a GPU is the host's, and takes none before something is written there. It counts against
   the card's own size. A range that is reserved and not mapped may not be touched, as on a GPU. */
#include "fake.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define GRANULE (2ull << 20)
#define PAGE 4096ull

/* Memory that lies somewhere: of cuMemAlloc, of the host, or reserved. */
typedef struct Range {
    struct Range *next;
    uint64_t begin, size;
    int device;
} Range;

/* Memory of cuMemCreate, which lies where it is mapped. */
typedef struct {
    uint64_t size;
    int device, users; /* the handle itself, and mappings */
} Physical;

/* Where which of it is mapped. */
typedef struct Mapping {
    struct Mapping *next;
    uint64_t begin;
    Physical *physical;
} Mapping;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Range *ranges;
static Mapping *mappings;
static uint64_t taken[MOST_DEVICES];

static uint64_t free_bytes(int device) {
    uint64_t whole = fake_card->mib << 20, used = fake_held_bytes + taken[device];
    return used < whole ? whole - used : 0;
}

static void *reserve(uint64_t size, int protection) {
    void *found = mmap(NULL, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return found == MAP_FAILED ? NULL : found;
}

/* Take `size` bytes of a GPU; 0 where so many are not free. The caller holds the mutex. */
static int take(int device, uint64_t size) {
    if (device < 0 || size > free_bytes(device)) return 0;
    taken[device] += size;
    return 1;
}

static int allocate(uint64_t *at, uint64_t size, int device) {
    if (!size) return INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    Range *one = NULL;
    void *memory = NULL;
    if (device < 0 || take(device, size)) memory = reserve(size, PROT_READ | PROT_WRITE);
    if (memory) {
        one = malloc(sizeof *one);
        *one = (Range){ranges, (uint64_t)memory, size, device};
        ranges = one;
        *at = one->begin;
    }
    pthread_mutex_unlock(&mutex);
    return memory ? OK : OUT_OF_MEMORY;
}

static int release(uint64_t at) {
    if (!at) return OK;
    pthread_mutex_lock(&mutex);
    Range **link = &ranges, *one;
    while (*link && (*link)->begin != at) link = &(*link)->next;
    if ((one = *link)) {
        *link = one->next;
        if (one->device >= 0) taken[one->device] -= one->size;
        munmap((void *)one->begin, one->size);
        free(one);
    }
    pthread_mutex_unlock(&mutex);
    return one ? OK : INVALID_VALUE;
}

EXPORT int cuMemGetInfo_v2(size_t *free_now, size_t *total) {
    BEGIN();
    pthread_mutex_lock(&mutex);
    *free_now = free_bytes(fake_current());
    pthread_mutex_unlock(&mutex);
    *total = fake_card->mib << 20;
    LOG("\"free\": %zu, \"total\": %zu", *free_now, *total);
    return OK;
}

EXPORT int cuMemGetAllocationGranularity(size_t *granule, const void *properties, int option) {
    (void)properties;
    BEGIN();
    *granule = GRANULE;
    LOG("\"option\": %d", option);
    return OK;
}

EXPORT int cuMemAddressReserve(uint64_t *at, size_t size, size_t alignment, uint64_t wanted,
                               unsigned long long flags) {
    (void)wanted, (void)flags;
    BEGIN();
    if (alignment < GRANULE) alignment = GRANULE;
    uint64_t begin = (uint64_t)reserve(size + alignment, PROT_NONE);
    if (!begin) return OUT_OF_MEMORY;
    *at = (begin + alignment - 1) / alignment * alignment;
    LOG("\"at\": %lu, \"bytes\": %zu", *at, size);
    return OK;
}

EXPORT int cuMemAddressFree(uint64_t at, size_t size) {
    LOG("\"at\": %lu, \"bytes\": %zu", at, size);
    return munmap((void *)at, size) ? INVALID_VALUE : OK;
}

/* The head of CUmemAllocationProp. */
typedef struct {
    int kind, handles, place, device;
} Properties;

EXPORT int cuMemCreate(Physical **handle, size_t size, const Properties *properties,
                       unsigned long long flags) {
    (void)flags;
    BEGIN();
    int device = fake_visible(properties->device);
    if (device < 0 || size % GRANULE) return INVALID_VALUE;
    pthread_mutex_lock(&mutex);
    int fits = take(device, size);
    pthread_mutex_unlock(&mutex);
    LOG("\"bytes\": %zu, \"of\": %d, \"fits\": %d", size, device, fits);
    if (!fits) return OUT_OF_MEMORY;
    *handle = malloc(sizeof **handle);
    **handle = (Physical){size, device, 1};
    return OK;
}

static void drop(Physical *physical) {
    if (--physical->users) return;
    taken[physical->device] -= physical->size;
    free(physical);
}

EXPORT int cuMemRelease(Physical *handle) {
    LOG("\"bytes\": %lu", handle->size);
    pthread_mutex_lock(&mutex);
    drop(handle);
    pthread_mutex_unlock(&mutex);
    return OK;
}

EXPORT int cuMemMap(uint64_t at, size_t size, size_t offset, Physical *handle,
                    unsigned long long flags) {
    (void)flags;
    BEGIN();
    if (offset || size != handle->size) return INVALID_VALUE;
    Mapping *one = malloc(sizeof *one);
    pthread_mutex_lock(&mutex);
    *one = (Mapping){mappings, at, handle};
    mappings = one;
    handle->users++;
    pthread_mutex_unlock(&mutex);
    LOG("\"at\": %lu, \"bytes\": %zu", at, size);
    return OK;
}

EXPORT int cuMemSetAccess(uint64_t at, size_t size, const void *who, size_t count) {
    (void)who, (void)count;
    BEGIN();
    LOG("\"at\": %lu, \"bytes\": %zu", at, size);
    return mprotect((void *)at, size, PROT_READ | PROT_WRITE) ? INVALID_VALUE : OK;
}

EXPORT int cuMemUnmap(uint64_t at, size_t size) {
    LOG("\"at\": %lu, \"bytes\": %zu", at, size);
    pthread_mutex_lock(&mutex);
    for (Mapping **link = &mappings, *one; (one = *link);) {
        if (one->begin < at || one->begin >= at + size) {
            link = &one->next;
            continue;
        }
        *link = one->next;
        drop(one->physical);
        free(one);
    }
    pthread_mutex_unlock(&mutex);
    madvise((void *)at, size, MADV_DONTNEED);
    return mprotect((void *)at, size, PROT_NONE) ? INVALID_VALUE : OK;
}

EXPORT int cuMemAlloc_v2(uint64_t *at, size_t size) {
    BEGIN();
    LOG("\"bytes\": %zu", size);
    return allocate(at, size, fake_current());
}

EXPORT int cuMemFree_v2(uint64_t at) {
    LOG("");
    return release(at);
}

EXPORT int cuMemAllocAsync(uint64_t *at, size_t size, void *stream) {
    BEGIN();
    LOG("\"bytes\": %zu, \"stream\": %d", size, fake_stream(stream));
    return allocate(at, size, fake_current());
}

EXPORT int cuMemFreeAsync(uint64_t at, void *stream) {
    LOG("\"stream\": %d", fake_stream(stream));
    return release(at);
}

EXPORT int cuMemHostAlloc(void **at, size_t size, unsigned flags) {
    BEGIN();
    LOG("\"bytes\": %zu, \"flags\": %u", size, flags);
    return allocate((uint64_t *)at, size, -1);
}

EXPORT int cuMemAllocHost_v2(void **at, size_t size) { return cuMemHostAlloc(at, size, 0); }

EXPORT int cuMemFreeHost(void *at) {
    LOG("");
    return release((uint64_t)at);
}

EXPORT int cuMemHostRegister_v2(void *at, size_t size, unsigned flags) {
    (void)at;
    BEGIN();
    LOG("\"bytes\": %zu, \"flags\": %u", size, flags);
    return OK;
}

EXPORT int cuMemHostUnregister(void *at) {
    (void)at;
    LOG("");
    return OK;
}

EXPORT int cuMemHostGetDevicePointer_v2(uint64_t *there, void *here, unsigned flags) {
    (void)flags;
    *there = (uint64_t)here;
    return OK;
}

/* A copy, of which the log says from where to where: "host" or "device". */
#define COPY(to, from, size, where, stream)                                                \
    do {                                                                                   \
        BEGIN();                                                                           \
        LOG("\"to\": %lu, \"from\": %lu, \"bytes\": %zu, \"copy\": \"%s\", \"stream\": %d", \
            (uint64_t)(to), (uint64_t)(from), size, where, fake_stream(stream));           \
        memmove((void *)(to), (const void *)(from), size);                                 \
        return OK;                                                                         \
    } while (0)

EXPORT int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) {
    COPY(to, from, size, "up", NULL);
}
EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, void *stream) {
    COPY(to, from, size, "up", stream);
}
EXPORT int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
    COPY(to, from, size, "down", NULL);
}
EXPORT int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, void *stream) {
    COPY(to, from, size, "down", stream);
}
EXPORT int cuMemcpyDtoD_v2(uint64_t to, uint64_t from, size_t size) {
    COPY(to, from, size, "across", NULL);
}
EXPORT int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void *stream) {
    COPY(to, from, size, "across", stream);
}

/* Zeros over whole pages give the pages back, so that a pool of 64 GiB takes no memory here. */
static void fill(uint64_t at, uint64_t value, size_t width, size_t count) {
    if (!count) return; /* of a buffer of no bytes, which lies nowhere */
    uint64_t size = width * count, first = (at + PAGE - 1) / PAGE * PAGE;
    uint64_t last = (at + size) / PAGE * PAGE;
    if (!value && first < last && !madvise((void *)first, last - first, MADV_DONTNEED)) {
        memset((void *)at, 0, first - at);
        memset((void *)last, 0, at + size - last);
        return;
    }
    for (size_t i = 0; i < count; i++) memcpy((char *)at + i * width, &value, width);
}

#define FILL(at, value, width, count, stream)                                              \
    do {                                                                                   \
        BEGIN();                                                                           \
        LOG("\"to\": %lu, \"bytes\": %zu, \"value\": %u, \"stream\": %d", at,              \
            (size_t)(width) * (count), (unsigned)(value), fake_stream(stream));            \
        fill(at, value, width, count);                                                     \
        return OK;                                                                         \
    } while (0)

EXPORT int cuMemsetD8Async(uint64_t at, unsigned char value, size_t count, void *stream) {
    FILL(at, value, 1, count, stream);
}
EXPORT int cuMemsetD16Async(uint64_t at, unsigned short value, size_t count, void *stream) {
    FILL(at, value, 2, count, stream);
}
EXPORT int cuMemsetD32Async(uint64_t at, unsigned value, size_t count, void *stream) {
    FILL(at, value, 4, count, stream);
}
EXPORT int cuMemsetD8_v2(uint64_t at, unsigned char value, size_t count) {
    FILL(at, value, 1, count, NULL);
}
EXPORT int cuMemsetD16_v2(uint64_t at, unsigned short value, size_t count) {
    FILL(at, value, 2, count, NULL);
}
EXPORT int cuMemsetD32_v2(uint64_t at, unsigned value, size_t count) {
    FILL(at, value, 4, count, NULL);
}
