/* libnvidia-ml: what MAX asks of a card's health and memory before it opens it. */
#include "fake.h"

#include <stdio.h>
#include <string.h>

/* A handle is the number of the card, and one. */
static int number_of(const void *handle) { return (int)(intptr_t)handle - 1; }

#define BEGIN_NVML(handle)                                        \
    do {                                                          \
        fake_log(__func__, number_of(handle), "");                \
        if (fake_is_lost(number_of(handle))) return NVML_LOST;    \
    } while (0)

EXPORT int nvmlInit_v2(void) { return OK; }
EXPORT int nvmlShutdown(void) { return OK; }

EXPORT const char *nvmlErrorString(int error) {
    return error == NVML_LOST ? "GPU is lost" : error ? "Not Found" : "Success";
}

/* Drivers of CUDA 12.4 to 13.1, by the number of their branch. */
EXPORT int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    int branch = fake_cuda_version >= 13010   ? 590
                 : fake_cuda_version >= 13000 ? 580
                 : fake_cuda_version >= 12090 ? 575
                 : fake_cuda_version >= 12080 ? 570
                 : fake_cuda_version >= 12060 ? 560
                                              : 550;
    snprintf(version, size, "%d.10.05", branch);
    fake_log(__func__, -1, "\"version\": \"%s\"", version);
    return OK;
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = fake_cuda_version;
    return OK;
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)fake_devices;
    fake_log(__func__, -1, "\"count\": %u", *count);
    return OK;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if ((int)index >= fake_devices) return NVML_NOT_FOUND;
    *handle = (void *)(intptr_t)(index + 1);
    return OK;
}

EXPORT int nvmlDeviceGetHandleByIndex(unsigned index, void **handle) {
    return nvmlDeviceGetHandleByIndex_v2(index, handle);
}

EXPORT int nvmlDeviceGetName(void *handle, char *name, unsigned size) {
    BEGIN_NVML(handle);
    snprintf(name, size, "%s", fake_card->name);
    return OK;
}

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
} Pci;

EXPORT int nvmlDeviceGetPciInfo_v3(void *handle, Pci *pci) {
    BEGIN_NVML(handle);
    memset(pci, 0, sizeof *pci);
    pci->bus = 0x45u + (unsigned)number_of(handle);
    snprintf(pci->legacy, sizeof pci->legacy, "0000:%02X:00.0", pci->bus);
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", pci->bus);
    return OK;
}

EXPORT int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    BEGIN_NVML(handle);
    *major = fake_card->major, *minor = fake_card->minor;
    return OK;
}

typedef struct {
    unsigned long long total, free, used;
} Memory;

EXPORT int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    BEGIN_NVML(handle);
    memory->total = fake_card->mib << 20;
    memory->used = fake_held_bytes; /* what this process takes is not in it */
    memory->free = memory->total - memory->used;
    return OK;
}

EXPORT int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    BEGIN_NVML(handle);
    *current = *pending = 0;
    return OK;
}

EXPORT int nvmlDeviceGetTotalEccErrors(void *handle, int kind, int counter,
                                       unsigned long long *count) {
    (void)counter;
    BEGIN_NVML(handle);
    int has_them = fake_ecc_card < 0 || fake_ecc_card == number_of(handle);
    *count = kind == 1 && has_them ? fake_ecc_errors : 0; /* uncorrected */
    return OK;
}

EXPORT int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *reasons) {
    BEGIN_NVML(handle);
    *reasons = fake_throttle;
    return OK;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, void *found) {
    (void)found;
    BEGIN_NVML(handle);
    *count = 0;
    return OK;
}
