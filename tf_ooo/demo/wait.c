/* OooWait holds its TensorFlow device for `seconds`, one task at a time, first come first served, and hands its tensor
 * on.  The file OOO_WAIT_LOG, which all processes map, has a scale of all seconds and a log of what ran.
 * This is TensorFlow's C API alone, and so tied to no version of its C++. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

/* From tensorflow/c/{kernels,ops,tf_status,tf_tensor}.h, which a C compiler does not take as they are. */
typedef void *Any;
typedef struct { const char *data; size_t size; } View;
Any TF_NewStatus(void), TF_NewShapeHandle(void), TF_NewOpDefinitionBuilder(const char *name);
void TF_DeleteStatus(Any), TF_DeleteTensor(Any), TF_DeleteShapeHandle(Any);
void TF_OpDefinitionBuilderAddAttr(Any, const char *), TF_OpDefinitionBuilderAddInput(Any, const char *);
void TF_OpDefinitionBuilderAddOutput(Any, const char *), TF_RegisterOpDefinition(Any, Any status);
void TF_OpDefinitionBuilderSetShapeInferenceFunction(Any, void (*)(Any, Any));
void TF_ShapeInferenceContextGetInput(Any, int, Any, Any status);
void TF_ShapeInferenceContextSetOutput(Any, int, Any, Any status);
Any TF_NewKernelBuilder(const char *op, const char *device, Any (*)(Any), void (*)(Any, Any), void (*)(Any));
void TF_RegisterKernelBuilder(const char *name, Any, Any status);
void TF_OpKernelConstruction_GetAttrFloat(Any, const char *name, float *, Any status);
void TF_GetInput(Any, int, Any *tensor, Any status), TF_SetOutput(Any, int, Any tensor, Any status);
View TF_GetOpKernelName(Any);
View TF_GetDeviceName(Any) __attribute__((weak)); /* TensorFlow 2.15 gives only a number, within one process. */
int TF_GetDeviceId(Any);

enum { RECORDS = 1 << 16, DEVICES = 64 };
typedef struct { double arrived, start, end; char device[64], name[168]; } Record;
static struct { double scale; unsigned long next; char unused[240]; Record records[RECORDS]; } *shared;
static struct { char name[64]; unsigned long taken, served; pthread_cond_t turn; } devices[DEVICES];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* Sleeps; the last 30 microseconds it spins. */
static void until(double due) {
  double wake = due - 30e-6;
  struct timespec t = {(time_t)wake, (long)((wake - (time_t)wake) * 1e9)};
  prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
  while (now() < wake) clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
  while (now() < due) {}
}

/* The end of a text, which is what tells names apart. */
static void put(char *to, size_t room, View from) {
  size_t size = from.size < room ? from.size : room - 1;
  memcpy(to, from.data + from.size - size, size);
}

static void hold(Record *record, double seconds) {
  int device = 0;
  record->arrived = now();
  pthread_mutex_lock(&mutex);
  while (device < DEVICES - 1 && devices[device].name[0] && strcmp(devices[device].name, record->device)) ++device;
  if (!devices[device].name[0]) pthread_cond_init(&devices[device].turn, NULL);
  strcpy(devices[device].name, record->device);
  unsigned long mine = devices[device].taken++;
  while (devices[device].served != mine) pthread_cond_wait(&devices[device].turn, &mutex);
  pthread_mutex_unlock(&mutex);
  record->start = now();
  until(record->start + seconds);
  record->end = now();
  pthread_mutex_lock(&mutex);
  ++devices[device].served;
  pthread_cond_broadcast(&devices[device].turn);
  pthread_mutex_unlock(&mutex);
}

static Any create(Any construction) {
  Any status = TF_NewStatus();
  float *seconds = malloc(sizeof *seconds);
  TF_OpKernelConstruction_GetAttrFloat(construction, "seconds", seconds, status);
  TF_DeleteStatus(status);
  return seconds;
}

static void compute(Any seconds, Any context) {
  Any status = TF_NewStatus(), tensor;
  double scaled = *(float *)seconds * shared->scale;
  if (scaled > 0) {
    Record record = {0};
    if (TF_GetDeviceName) put(record.device, sizeof record.device, TF_GetDeviceName(context));
    else snprintf(record.device, sizeof record.device, "/device:CPU:%d", TF_GetDeviceId(context));
    put(record.name, sizeof record.name, TF_GetOpKernelName(context));
    hold(&record, scaled);
    shared->records[__atomic_fetch_add(&shared->next, 1, __ATOMIC_SEQ_CST) % RECORDS] = record;
  }
  TF_GetInput(context, 0, &tensor, status);
  TF_SetOutput(context, 0, tensor, status);
  TF_DeleteTensor(tensor);
  TF_DeleteStatus(status);
}

static void same_shape(Any context, Any status) {
  Any shape = TF_NewShapeHandle();
  TF_ShapeInferenceContextGetInput(context, 0, shape, status);
  TF_ShapeInferenceContextSetOutput(context, 0, shape, status);
  TF_DeleteShapeHandle(shape);
}

__attribute__((constructor)) static void load(void) {
  const char *path = getenv("OOO_WAIT_LOG");
  int file = path ? open(path, O_RDWR | O_CREAT, 0600) : -1;
  if (file < 0 || ftruncate(file, sizeof *shared)) abort();
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (shared == MAP_FAILED) abort();
  Any status = TF_NewStatus(), op = TF_NewOpDefinitionBuilder("OooWait");
  TF_OpDefinitionBuilderAddInput(op, "x: T");
  TF_OpDefinitionBuilderAddOutput(op, "y: T");
  TF_OpDefinitionBuilderAddAttr(op, "T: type");
  TF_OpDefinitionBuilderAddAttr(op, "seconds: float");
  TF_OpDefinitionBuilderSetShapeInferenceFunction(op, same_shape);
  TF_RegisterOpDefinition(op, status);
  TF_RegisterKernelBuilder("OooWait", TF_NewKernelBuilder("OooWait", "CPU", create, compute, free), status);
  TF_DeleteStatus(status);
}
