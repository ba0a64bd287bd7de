/* What the files of the fake driver share; README.md says what it is. */
#pragma once

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <stdint.h>

/* A model of GPU, with what a caller may ask of it. */
typedef struct {
    const char *key, *name;
    int major, minor, processors, threads_per_processor;
    uint64_t mib;
    int shared_per_processor, shared_per_block; /* the latter as a kernel may ask for */
    int l2, clock_khz, memory_khz, bus_bits;
} Card;

/* Numbers of CUresult and nvmlReturn_t that are given here. */
enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    UNAVAILABLE = 46,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    NOT_FOUND = 500,
    OUT_OF_RESOURCES = 701,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    NVML_NOT_FOUND = 6,
    NVML_LOST = 15,
};

#define MOST_DEVICES 8

/* From the environment, read once. */
extern const Card *fake_card;
extern int fake_devices, fake_cuda_version;
extern int fake_ecc_card; /* the one that has them; -1: all */
extern double fake_step_ms;
extern uint64_t fake_held_bytes, fake_throttle, fake_ecc_errors;

/* Whether this GPU is lost by now. */
int fake_is_lost(int device);

/* To be called first in every function: waits or fails if it is to, and writes that it does. Returns
   the error that it fails with, or OK. */
int fake_begin(const char *call, int device);

/* Write a line about a call; `format` gives the members of a JSON object, or is empty. */
void fake_log(const char *call, int device, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The GPU of the calling thread's context, -1 where it has none. Only in libcuda, as what follows. */
int fake_current(void);

/* The GPU that a process calls by this number, which CUDA_VISIBLE_DEVICES decides; -1 for none. */
int fake_visible(int ordinal);

/* Launches of the capture under way; -1: there is none. */
extern int fake_captured;

/* Whether anything was launched, and not only captured, since an event was recorded. */
extern int fake_launched;

/* The number of a stream, 0 of a context's default one. */
int fake_stream(const void *stream);

#define BEGIN_ON(device)                                        \
    do {                                                        \
        int status_ = fake_begin(__func__, device);             \
        if (status_ != OK) return status_;                      \
    } while (0)
#define BEGIN() BEGIN_ON(fake_current())
#define LOG(...) fake_log(__func__, fake_current(), __VA_ARGS__)
#define EXPORT __attribute__((visibility("default")))
