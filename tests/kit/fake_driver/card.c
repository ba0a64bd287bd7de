/* The cards, what the environment says, and the log: of both libraries. */
#include "fake.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static const Card CARDS[] = {
    {"H100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 2048, 81559, 233472, 232448,
     52428800, 1980000, 2619000, 5120},
    {"H200", "NVIDIA H200", 9, 0, 132, 2048, 143771, 233472, 232448,
     52428800, 1980000, 3201000, 6144},
    {"A100", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 2048, 81920, 167936, 166912,
     41943040, 1410000, 1593000, 5120},
    {"L4", "NVIDIA L4", 8, 9, 58, 1536, 23034, 102400, 101376,
     50331648, 2040000, 6251000, 192},
    {"B200", "NVIDIA B200", 10, 0, 148, 2048, 183359, 233472, 232448,
     132644864, 1965000, 3996000, 8192},
    {"T4", "Tesla T4", 7, 5, 40, 1024, 15360, 65536, 65536, 4194304, 1590000, 5001000, 256},
};

const Card *fake_card = CARDS;
int fake_devices = 1, fake_cuda_version = 13000, fake_ecc_card = -1;
double fake_step_ms;
uint64_t fake_held_bytes = 600ull << 20, fake_throttle, fake_ecc_errors;

/* One of FAKE_CUDA_FAIL: from which call on, of this name, what happens. */
typedef struct {
    char call[64];
    int from, and_after, error, seen;
    char until[256]; /* a file */
} Fault;

#define MOST_FAULTS 16
static Fault faults[MOST_FAULTS];
static int num_faults, log_file = -1;
static const char *lost_folder;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* A mistake in a test must not look like a healthy card. */
static void refuse(const char *name, const char *value) {
    fprintf(stderr, "fake driver: %s = %s is not understood\n", name, value);
    abort();
}

/* CALL#N=ERROR or CALL#N~FILE: of the Nth call of that name, N+ of all after it too. */
static void read_fault(const char *text) {
    Fault one = {.from = 0};
    size_t name = strcspn(text, "#");
    char *end = NULL;
    if (!text[name] || name >= sizeof one.call || num_faults == MOST_FAULTS)
        refuse("FAKE_CUDA_FAIL", text);
    memcpy(one.call, text, name);
    one.from = (int)strtol(text + name + 1, &end, 10);
    if ((one.and_after = *end == '+')) end++;
    const char kind = *end, *what = end + (kind != 0);
    if (kind == '~') {
        snprintf(one.until, sizeof one.until, "%s", what);
    } else {
        one.error = (int)strtol(what, &end, 10);
        if (kind != '=' || *end) refuse("FAKE_CUDA_FAIL", text);
    }
    if (!*what) refuse("FAKE_CUDA_FAIL", text);
    faults[num_faults++] = one;
}

static uint64_t number_of(const char *name, uint64_t otherwise) {
    const char *value = getenv(name);
    if (!value || !*value) return otherwise;
    char *end;
    uint64_t number = strtoull(value, &end, 0);
    if (*end) refuse(name, value);
    return number;
}

__attribute__((constructor)) static void read_environment(void) {
    const char *key = getenv("FAKE_CUDA_CARD"), *fails = getenv("FAKE_CUDA_FAIL");
    const char *log = getenv("FAKE_CUDA_LOG");
    if (key && *key) {
        fake_card = NULL;
        for (size_t i = 0; i < sizeof CARDS / sizeof *CARDS; i++)
            if (!strcmp(key, CARDS[i].key)) fake_card = &CARDS[i];
        if (!fake_card) refuse("FAKE_CUDA_CARD", key);
    }
    fake_devices = (int)number_of("FAKE_CUDA_DEVICES", 1);
    if (fake_devices > MOST_DEVICES) refuse("FAKE_CUDA_DEVICES", getenv("FAKE_CUDA_DEVICES"));
    fake_cuda_version = (int)number_of("FAKE_CUDA_VERSION", 13000);
    fake_held_bytes = number_of("FAKE_CUDA_HELD_MIB", 600) << 20;
    fake_throttle = number_of("FAKE_CUDA_THROTTLE", 0);
    fake_ecc_errors = number_of("FAKE_CUDA_ECC", 0);
    fake_ecc_card = (int)number_of("FAKE_CUDA_ECC_CARD", -1);
    fake_step_ms = number_of("FAKE_CUDA_STEP_US", 0) / 1e3;
    lost_folder = getenv("FAKE_CUDA_LOST");
    if (fails) {
        char copy[1024], *rest = copy;
        snprintf(copy, sizeof copy, "%s", fails);
        for (char *one; (one = strsep(&rest, ","));)
            if (*one) read_fault(one);
    }
    if (log && *log && (log_file = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644)) < 0)
        refuse("FAKE_CUDA_LOG", log);
}

int fake_is_lost(int device) {
    if (!lost_folder || device < 0) return 0;
    char path[4096];
    snprintf(path, sizeof path, "%s/lost-%d", lost_folder, device);
    return access(path, F_OK) == 0;
}

int fake_begin(const char *call, int device) {
    int error = OK;
    const char *until = NULL;
    pthread_mutex_lock(&mutex);
    for (Fault *one = faults; one < faults + num_faults; one++)
        if (!strcmp(one->call, call)) {
            int number = ++one->seen;
            if (number == one->from || (number > one->from && one->and_after)) {
                if (*one->until) until = one->until;
                else error = one->error;
            }
        }
    pthread_mutex_unlock(&mutex);
    if (until) {
        fake_log(call, device, "\"until\": \"%s\"", until);
        while (access(until, F_OK)) usleep(1000);
    }
    if (!error && fake_is_lost(device)) error = LAUNCH_FAILED;
    if (error) fake_log(call, device, "\"error\": %d", error);
    return error;
}

/* One `write` of a file that is only appended to: lines of several processes do not mix. */
void fake_log(const char *call, int device, const char *format, ...) {
    if (log_file < 0) return;
    char line[16384];
    int size = snprintf(line, sizeof line,
                        "{\"process\": %d, \"thread\": %ld, \"device\": %d, \"call\": \"%s\"%s",
                        getpid(), (long)syscall(SYS_gettid), device, call, *format ? ", " : "");
    va_list values;
    va_start(values, format);
    size += vsnprintf(line + size, sizeof line - size, format, values);
    va_end(values);
    if (size > (int)sizeof line - 3) refuse("a line of the log", call);
    memcpy(line + size, "}\n", 2);
    if (write(log_file, line, size + 2) != size + 2) refuse("FAKE_CUDA_LOG", "a full disk");
}
