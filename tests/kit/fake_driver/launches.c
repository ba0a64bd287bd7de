/* libcuda: machine code, launches and descriptors of TMA. Nothing is launched: a launch is held to
   what the card and the kernel allow, as a driver does, and written down with its parameters. */
#include "fake.h"

#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_PARAMETERS 64
#define CUDA_MACHINE 190

/* What a kernel's section .nv.info says, by the numbers of its attributes. */
enum { REQUIRED_THREADS = 0x10, PARAMETER = 0x17, CLUSTER = 0x3d, VALUE_FORM = 4 };

typedef struct Function {
    struct Function *next;
    char *name;
    int num_parameters;
    struct {
        uint32_t offset, size;
    } parameters[MOST_PARAMETERS];
    uint32_t cluster[3], threads[3]; /* 0 where the kernel takes any */
    int shared_opt_in;
} Function;

typedef struct {
    Function *functions;
} Module;

static void read_attributes(Function *function, const unsigned char *at, uint64_t size) {
    for (const unsigned char *end = at + size; at + 4 <= end;) {
        int form = at[0], kind = at[1];
        uint16_t length = 0;
        memcpy(&length, at + 2, 2);
        at += 4;
        if (form != VALUE_FORM) continue;
        uint32_t words[3] = {0};
        memcpy(words, at, length < sizeof words ? length : sizeof words);
        uint32_t index = words[1] & 0xffff;
        if (kind == PARAMETER && index < MOST_PARAMETERS) {
            function->parameters[index].offset = words[1] >> 16;
            function->parameters[index].size = words[2] >> 18;
            if ((int)index >= function->num_parameters) function->num_parameters = index + 1;
        }
        if (kind == CLUSTER) memcpy(function->cluster, words, sizeof words);
        if (kind == REQUIRED_THREADS) memcpy(function->threads, words, sizeof words);
        at += length;
    }
}

/* An ELF file of a cubin; its section .nv.info.NAME is of the kernel NAME. */
EXPORT int cuModuleLoadDataEx(Module **module, const void *image, unsigned num_options,
                              const int *options, void **values) {
    (void)options, (void)values;
    BEGIN();
    const unsigned char *bytes = image;
    const Elf64_Ehdr *head = image;
    if (memcmp(bytes, ELFMAG, SELFMAG) || head->e_machine != CUDA_MACHINE) {
        LOG("\"error\": %d", NO_BINARY_FOR_GPU); /* PTX, which a driver would compile */
        return NO_BINARY_FOR_GPU;
    }
    int architecture = head->e_flags >> 8 & 0xff, own = 10 * fake_card->major + fake_card->minor;
    LOG("\"architecture\": %d, \"options\": %u", architecture, num_options);
    if (architecture / 10 != fake_card->major || architecture > own) return NO_BINARY_FOR_GPU;
    Module *found = calloc(1, sizeof *found);
    const Elf64_Shdr *sections = (const void *)(bytes + head->e_shoff);
    const char *names = (const char *)bytes + sections[head->e_shstrndx].sh_offset;
    for (int i = 0; i < head->e_shnum; i++) {
        const char *name = names + sections[i].sh_name, *begin = ".nv.info.";
        if (strncmp(name, begin, strlen(begin))) continue;
        Function *one = calloc(1, sizeof *one);
        one->name = strdup(name + strlen(begin));
        one->next = found->functions;
        found->functions = one;
        read_attributes(one, bytes + sections[i].sh_offset, sections[i].sh_size);
    }
    *module = found;
    return OK;
}

EXPORT int cuModuleUnload(Module *module) {
    LOG("");
    for (Function *one = module->functions, *next; one; one = next) {
        next = one->next;
        free(one->name);
        free(one);
    }
    free(module);
    return OK;
}

EXPORT int cuModuleGetFunction(Function **function, Module *module, const char *name) {
    BEGIN();
    Function *one = module->functions;
    while (one && strcmp(one->name, name)) one = one->next;
    LOG("\"kernel\": \"%s\", \"is_there\": %d", name, one != NULL);
    *function = one;
    return one ? OK : NOT_FOUND;
}

EXPORT int cuModuleGetGlobal_v2(uint64_t *at, size_t *size, Module *module, const char *name) {
    (void)at, (void)size, (void)module;
    BEGIN();
    LOG("\"name\": \"%s\"", name);
    return NOT_FOUND;
}

/* By the numbers of CUfunction_attribute. */
enum { MOST_THREADS = 0, SHARED_OPT_IN = 8 };

EXPORT int cuFuncGetAttribute(int *value, int attribute, Function *function) {
    BEGIN();
    *value = attribute == MOST_THREADS    ? 1024
             : attribute == SHARED_OPT_IN ? function->shared_opt_in
                                          : 0;
    LOG("\"kernel\": \"%s\", \"attribute\": %d", function->name, attribute);
    return OK;
}

EXPORT int cuFuncSetAttribute(Function *function, int attribute, int value) {
    BEGIN();
    LOG("\"kernel\": \"%s\", \"attribute\": %d, \"value\": %d", function->name, attribute, value);
    if (attribute != SHARED_OPT_IN) return OK;
    if (value > fake_card->shared_per_block) return INVALID_VALUE;
    function->shared_opt_in = value;
    return OK;
}

EXPORT int cuFuncGetParamInfo(Function *function, size_t index, size_t *offset, size_t *size) {
    BEGIN();
    LOG("\"kernel\": \"%s\", \"index\": %zu", function->name, index);
    if ((int)index >= function->num_parameters) return INVALID_VALUE;
    *offset = function->parameters[index].offset;
    if (size) *size = function->parameters[index].size;
    return OK;
}

EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, Function *function, int threads,
                                                       size_t shared) {
    BEGIN();
    int by_threads = fake_card->threads_per_processor / threads;
    int by_shared = fake_card->shared_per_processor / (int)(shared + 1024);
    *blocks = by_threads < by_shared ? by_threads : by_shared;
    LOG("\"kernel\": \"%s\", \"blocks\": %d", function->name, *blocks);
    return OK;
}

/* What cuTensorMapEncodeTiled writes in place of NVIDIA's secret form, in its 128 bytes. */
typedef struct {
    uint64_t tag, address, dims[2], stride;
    uint32_t box[2], steps[2];
    uint8_t dtype, rank, interleave, swizzle, promotion, fill;
} Map;

#define MAP_BYTES 128
#define MAP_TAG 0x70614d726f736e54ull

static const int SIZES[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4}; /* of CUtensorMapDataType */
static const uint32_t SWIZZLES[] = {256, 32, 64, 128};              /* bytes, of "none" any box */

/* The rules of the driver API, for maps of one or two dimensions, which ours are. */
static int is_sound(const void *map, const Map *of) {
    if (of->dtype >= sizeof SIZES / sizeof *SIZES || of->swizzle > 3) return 0;
    if ((uint64_t)map % 64 || of->address % 16 || of->stride % 16) return 0;
    for (int i = 0; i < of->rank; i++)
        if (!of->dims[i] || of->dims[i] > 1ull << 32 || !of->box[i] || of->box[i] > 256) return 0;
    uint32_t inner = of->box[0] * SIZES[of->dtype];
    return inner % 16 == 0 && (!of->swizzle || inner <= SWIZZLES[of->swizzle]);
}

static int write_map(const Map *map, char *into, size_t room) {
    return snprintf(into, room,
                    "{\"address\": %lu, \"dims\": [%lu, %lu], \"stride\": %lu, \"box\": [%u, %u], "
                    "\"steps\": [%u, %u], \"dtype\": %u, \"rank\": %u, \"interleave\": %u, "
                    "\"swizzle\": %u, \"promotion\": %u, \"fill\": %u}",
                    map->address, map->dims[0], map->dims[1], map->stride, map->box[0], map->box[1],
                    map->steps[0], map->steps[1], map->dtype, map->rank, map->interleave,
                    map->swizzle, map->promotion, map->fill);
}

EXPORT int cuTensorMapEncodeTiled(void *map, int dtype, uint32_t rank, void *address,
                                  const uint64_t *dims, const uint64_t *strides,
                                  const uint32_t *box, const uint32_t *steps, int interleave,
                                  int swizzle, int promotion, int fill) {
    BEGIN();
    if (rank < 1 || rank > 2) return NOT_SUPPORTED;
    Map made = {MAP_TAG, (uint64_t)address, {dims[0], 1}, 0, {box[0], 1}, {steps[0], 1},
                (uint8_t)dtype, (uint8_t)rank, (uint8_t)interleave, (uint8_t)swizzle,
                (uint8_t)promotion, (uint8_t)fill};
    if (rank == 2) {
        made.dims[1] = dims[1], made.box[1] = box[1], made.steps[1] = steps[1];
        made.stride = strides[0];
    }
    int sound = is_sound(map, &made);
    char text[1024];
    write_map(&made, text, sizeof text);
    LOG("\"map\": %s, \"sound\": %d", text, sound);
    if (!sound) return INVALID_VALUE;
    memset(map, 0, MAP_BYTES);
    memcpy(map, &made, sizeof made);
    return OK;
}

/* Each parameter as the kernel would get it: its bytes, or a descriptor. */
static void write_parameters(const Function *function, void **given, char *into, size_t room) {
    size_t used = 0;
    for (int i = 0; i < function->num_parameters && used + 1200 < room; i++) {
        const unsigned char *bytes = given[i];
        uint32_t size = function->parameters[i].size;
        if (i) used += snprintf(into + used, room - used, ", ");
        if (size == MAP_BYTES && !memcmp(bytes, &(uint64_t){MAP_TAG}, 8)) {
            used += write_map((const Map *)bytes, into + used, room - used);
            continue;
        }
        into[used++] = '"';
        for (uint32_t k = 0; k < size && used + 4 < room; k++)
            used += snprintf(into + used, room - used, "%02x", bytes[k]);
        into[used++] = '"';
    }
    into[used] = 0;
}

/* CUlaunchConfig and CUlaunchAttribute. */
typedef struct {
    uint32_t kind, padding;
    union {
        uint32_t cluster[3];
        int is_dependent;
        char room[64];
    } value;
} Attribute;
typedef struct {
    uint32_t grid[3], block[3], shared;
    void *stream;
    const Attribute *attributes;
    uint32_t num_attributes;
} Configuration;
enum { CLUSTER_ATTRIBUTE = 4, PROGRAMMATIC_STREAM_SERIALIZATION = 6 };

static int allowed(const Function *function, const Configuration *how, const uint32_t *cluster) {
    uint64_t threads = (uint64_t)how->block[0] * how->block[1] * how->block[2];
    uint64_t blocks = cluster[0] * cluster[1] * cluster[2];
    int room = function->shared_opt_in > 49152 ? function->shared_opt_in : 49152;
    if (!threads || threads > 1024 || (int)how->shared > room) return INVALID_VALUE;
    if (blocks > 8 || (blocks > 1 && fake_card->major < 9)) return INVALID_VALUE;
    for (int i = 0; i < 3; i++) {
        if (!how->grid[i] || how->grid[i] % cluster[i]) return INVALID_VALUE;
        if (function->threads[0] && how->block[i] > function->threads[i]) return INVALID_VALUE;
    }
    return OK;
}

EXPORT int cuLaunchKernelEx(const Configuration *how, Function *function, void **parameters,
                            void **extra) {
    BEGIN();
    uint32_t cluster[3] = {1, 1, 1};
    if (function->cluster[0]) memcpy(cluster, function->cluster, sizeof cluster);
    int is_dependent = 0;
    for (uint32_t i = 0; i < how->num_attributes; i++) {
        if (how->attributes[i].kind == CLUSTER_ATTRIBUTE)
            memcpy(cluster, how->attributes[i].value.cluster, sizeof cluster);
        if (how->attributes[i].kind == PROGRAMMATIC_STREAM_SERIALIZATION)
            is_dependent = how->attributes[i].value.is_dependent;
    }
    int status = extra ? NOT_SUPPORTED : allowed(function, how, cluster);
    if (fake_captured >= 0) fake_captured++;
    else fake_launched = 1;
    char text[8192];
    write_parameters(function, parameters, text, sizeof text);
    LOG("\"kernel\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared\": %u, "
        "\"opt_in\": %d, \"cluster\": [%u, %u, %u], \"is_dependent\": %d, \"stream\": %d, "
        "\"status\": %d, "
        "\"parameters\": [%s]",
        function->name, how->grid[0], how->grid[1], how->grid[2], how->block[0], how->block[1],
        how->block[2], how->shared, function->shared_opt_in, cluster[0], cluster[1], cluster[2],
        is_dependent, fake_stream(how->stream), status, text);
    return status;
}

EXPORT int cuLaunchKernel(Function *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                          void *stream, void **parameters, void **extra) {
    Configuration how = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared, stream,
                         NULL, 0};
    return cuLaunchKernelEx(&how, function, parameters, extra);
}

/* What MAX looks up and has no use for here: it answers that it is not supported. */
#define NOT_HERE(name)                                  \
    EXPORT int name(void) {                             \
        fake_log(#name, fake_current(), "\"error\": %d", NOT_SUPPORTED); \
        return NOT_SUPPORTED;                           \
    }
NOT_HERE(cuCtxEnablePeerAccess)
NOT_HERE(cuDeviceGetMemPool)
NOT_HERE(cuDeviceGetP2PAttribute)
NOT_HERE(cuGraphAddChildGraphNode)
NOT_HERE(cuGraphAddEmptyNode)
NOT_HERE(cuGraphAddKernelNode)
NOT_HERE(cuGraphAddMemcpyNode)
NOT_HERE(cuGraphAddMemsetNode)
NOT_HERE(cuGraphCreate)
NOT_HERE(cuGraphDebugDotPrint)
NOT_HERE(cuGraphInstantiate)
NOT_HERE(cuGraphInstantiateWithFlags)
NOT_HERE(cuGraphKernelNodeSetAttribute)
NOT_HERE(cuMemExportToShareableHandle)
NOT_HERE(cuMemGetAddressRange_v2)
NOT_HERE(cuMemGetHandleForAddressRange)
NOT_HERE(cuMemPoolSetAccess)
NOT_HERE(cuMemPoolTrimTo)
NOT_HERE(cuMemcpyBatchAsync)
NOT_HERE(cuMemcpyPeer)
NOT_HERE(cuMemcpyPeerAsync)
NOT_HERE(cuMemsetD2D32Async)
NOT_HERE(cuMemsetD2D32_v2)
NOT_HERE(cuMulticastAddDevice)
NOT_HERE(cuMulticastBindMem)
NOT_HERE(cuMulticastCreate)
NOT_HERE(cuMulticastGetGranularity)
NOT_HERE(cuMulticastUnbind)
NOT_HERE(cuPointerGetAttributes)
NOT_HERE(cuPointerSetAttribute)
NOT_HERE(cuStreamWaitValue64_v2)
NOT_HERE(cuTensorMapEncodeIm2col)

/* Device graphs: a capture counts its launches, and a launch of the graph says that number. */
typedef struct {
    int launches;
} Graph;
int fake_captured = -1, fake_launched;

EXPORT int cuStreamBeginCapture(void *stream, int mode) {
    BEGIN();
    LOG("\"stream\": %d, \"mode\": %d", fake_stream(stream), mode);
    if (fake_captured >= 0) return INVALID_VALUE;
    fake_captured = 0;
    return OK;
}

EXPORT int cuStreamEndCapture(void *stream, Graph **graph) {
    BEGIN();
    if (fake_captured < 0) return INVALID_VALUE;
    *graph = malloc(sizeof **graph);
    (*graph)->launches = fake_captured;
    fake_captured = -1;
    LOG("\"stream\": %d, \"launches\": %d", fake_stream(stream), (*graph)->launches);
    return OK;
}

EXPORT int cuGraphInstantiateWithParams(Graph **executable, const Graph *graph, void *how) {
    BEGIN();
    (void)how;
    *executable = malloc(sizeof **executable);
    **executable = *graph;
    LOG("\"launches\": %d", graph->launches);
    return OK;
}

EXPORT int cuGraphLaunch(const Graph *executable, void *stream) {
    BEGIN();
    fake_launched = 1;
    LOG("\"stream\": %d, \"launches\": %d", fake_stream(stream), executable->launches);
    return OK;
}

EXPORT int cuGraphDestroy(Graph *graph) {
    BEGIN();
    LOG("\"launches\": %d", graph->launches);
    free(graph);
    return OK;
}

EXPORT int cuGraphExecDestroy(Graph *executable) { return cuGraphDestroy(executable); }

EXPORT int cuDeviceGetGraphMemAttribute(int device, int attribute, uint64_t *bytes) {
    BEGIN();
    LOG("\"of\": %d, \"attribute\": %d", device, attribute);
    *bytes = 0;
    return OK;
}
