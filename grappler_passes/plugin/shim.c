/* The graph optimizer that TensorFlow loads: it hands the serialized graph to a Python callback.
 *
 * Built twice, once per device type (-DOOO_DEVICE_TYPE="CPU" or "GPU"), because TensorFlow takes
 * one device type per library.  It uses the official C ABI for graph optimizers
 * (tensorflow/c/experimental/grappler/grappler.h) but neither its headers nor a TensorFlow symbol
 * at link time, so building needs a C compiler only and one library serves TensorFlow 2.15 - 2.21.
 * tests/graph/test_plugin.py compares the structs below with the installed header.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Their names from before glibc 2.34 moved them, which it still has: so a wheel built here runs on older ones. */
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver dlopen,dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym,dlsym@GLIBC_2.2.5");
#endif

#ifndef OOO_DEVICE_TYPE
#error "compile with -DOOO_DEVICE_TYPE=\"CPU\" or \"GPU\""
#endif

#define OFFSET_OF_END(type, member) (offsetof(type, member) + sizeof(((type *)0)->member))

enum { STATUS_FAILED_PRECONDITION = 9, STATUS_ABORTED = 10 }; /* TF_Code */
enum { CONFIG_SWITCHES = 19 };

typedef struct {
  const void *data;
  size_t length;
  void (*data_deallocator)(void *data, size_t length);
} TFBuffer;

typedef struct {
  size_t struct_size;
  void *ext;
  int switches[CONFIG_SWITCHES]; /* TF_TriState each; 0 leaves TensorFlow's own optimizers as they are */
} OptimizerConfigs;

typedef struct {
  size_t struct_size;
  void *ext;
  void *(*create_func)(void);
  void (*optimize_func)(void *, const TFBuffer *, const void *item, TFBuffer *, void *status);
  void (*destroy_func)(void *);
} Optimizer;

typedef struct {
  size_t struct_size;
  void *ext;
  int32_t major_version;
  int32_t minor_version;
  int32_t patch_version;
  const char *device_type;
  OptimizerConfigs *optimizer_configs;
  Optimizer *optimizer;
} RegistrationParams;

/* Returns 1 when *result is a buffer from ooo_alloc that holds the new graph, 0 for "no change". */
typedef int (*Callback)(const void *graph, size_t length, void **result, size_t *result_length);

static _Atomic(Callback) callback;
static atomic_int enabled;
static atomic_int running;          /* Python calls under way, waited for before the interpreter ends */
static atomic_ulong python_calls;   /* for tests: 0 while nothing is registered */
static void (*set_status)(void *status, int code, const char *message);

void ooo_set_callback(Callback value) { atomic_store(&callback, value); }
void ooo_set_enabled(int value) { atomic_store(&enabled, value); }
/* In a forked child the calls that were under way are the parent's. */
void ooo_forget_running(void) { atomic_store(&running, 0); }
int ooo_running(void) { return atomic_load(&running); }
unsigned long ooo_python_calls(void) { return atomic_load(&python_calls); }
void *ooo_alloc(size_t length) { return malloc(length); }
void ooo_free(void *data) { free(data); }
const char *ooo_device_type(void) { return OOO_DEVICE_TYPE; }

static void free_result(void *data, size_t length) {
  (void)length;
  free(data);
}

/* TensorFlow wants a state object per optimizer; this one has none. */
static void *create(void) { return malloc(1); }
static void destroy(void *state) { free(state); }

/* Asks Python for a new graph.  Counts itself before it looks at `enabled` a second time, so that
 * whoever clears `enabled` and then sees `running` at 0 knows that no call is left or will come. */
static int ask_python(const TFBuffer *graph, void **result, size_t *length) {
  static const char mark[] = "_ooo_request";
  if (memmem(graph->data, graph->length, mark, sizeof(mark) - 1) == NULL) return 0;
  int changed = 0;
  atomic_fetch_add(&running, 1);
  Callback call = atomic_load(&callback);
  if (call != NULL && atomic_load(&enabled)) {
    atomic_fetch_add(&python_calls, 1);
    changed = call(graph->data, graph->length, result, length);
  }
  atomic_fetch_sub(&running, 1);
  return changed == 1 && *result != NULL && *length > 0;
}

static void optimize(void *state, const TFBuffer *graph, const void *item, TFBuffer *out, void *status) {
  (void)state;
  (void)item;
  void *result = NULL;
  size_t length = 0;
  if (!atomic_load(&enabled) || !ask_python(graph, &result, &length)) {
    set_status(status, STATUS_ABORTED, "nothing to do"); /* TensorFlow takes ABORTED as "no change", silently */
    return;
  }
  out->data = result;
  out->length = length;
  out->data_deallocator = free_result;
}

void TF_InitGraph(RegistrationParams *params, void *status) {
  void *framework = dlopen("libtensorflow_framework.so.2", RTLD_NOLOAD | RTLD_LAZY);
  void *handle = framework != NULL ? framework : RTLD_DEFAULT;
  *(void **)&set_status = dlsym(handle, "TF_SetStatus");
  if (set_status == NULL) abort(); /* no way to report; cannot happen inside TensorFlow */
  if (params->optimizer_configs == NULL || params->optimizer == NULL) {
    set_status(status, STATUS_FAILED_PRECONDITION, "tf_ooo: unknown plug-in interface");
    return;
  }
  params->struct_size = OFFSET_OF_END(RegistrationParams, optimizer);
  params->device_type = OOO_DEVICE_TYPE;
  params->optimizer_configs->struct_size = OFFSET_OF_END(OptimizerConfigs, switches);
  params->optimizer->struct_size = OFFSET_OF_END(Optimizer, destroy_func);
  params->optimizer->create_func = create;
  params->optimizer->optimize_func = optimize;
  params->optimizer->destroy_func = destroy;
}

/* The layout this file assumes, in the order of LAYOUT in tests/graph/test_plugin.py. */
static const size_t layout[] = {
    sizeof(TFBuffer), offsetof(TFBuffer, data), offsetof(TFBuffer, length), offsetof(TFBuffer, data_deallocator),
    OFFSET_OF_END(OptimizerConfigs, switches), offsetof(OptimizerConfigs, switches),
    OFFSET_OF_END(Optimizer, destroy_func), offsetof(Optimizer, create_func),
    offsetof(Optimizer, optimize_func), offsetof(Optimizer, destroy_func),
    OFFSET_OF_END(RegistrationParams, optimizer), offsetof(RegistrationParams, major_version),
    offsetof(RegistrationParams, device_type), offsetof(RegistrationParams, optimizer_configs),
    offsetof(RegistrationParams, optimizer),
};

size_t ooo_layout(size_t *values, size_t capacity) {
  size_t count = sizeof(layout) / sizeof(layout[0]);
  for (size_t i = 0; i < count && i < capacity; i++) values[i] = layout[i];
  return count;
}
