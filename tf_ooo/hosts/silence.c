/* Notices a process that is silent, whatever Python does, and lets others notice that this one is not.
 *
 * TensorFlow joins workers, and registers functions on them, in calls that hold Python's lock until the
 * workers have answered, and have no deadline.  A worker that is stopped meanwhile would keep this process
 * for ever: no thread of Python could notice.  Here a thread that needs nothing of Python asks the worker's
 * gRPC server for its greeting; after silence this process' connections to it are closed, so that whatever
 * waits fails. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* Their names from before glibc 2.34 moved them, as in grappler_passes/plugin/shim.c. */
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver pthread_create,pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_detach,pthread_detach@GLIBC_2.2.5");
__asm__(".symver pthread_sigmask,pthread_sigmask@GLIBC_2.2.5");
#endif

enum { MOST_ADDRESSES = 8, QUESTIONS = 6 };
static const double MOST_ANSWER_S = 10.0, CUT_AGAIN_S = 1.0;
/* What begins an HTTP/2 connection, and an empty SETTINGS frame; a server sends its own. */
static const char GREETING[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0";

/* A worker; all of its addresses are IPv6 ones, IPv4 as ::ffff:a.b.c.d. */
struct peer {
  int count;
  struct in6_addr at[MOST_ADDRESSES];
  in_port_t port; /* in network order */
  double silence_s;
  atomic_int silent;
  atomic_int ended;
};

static double now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void sleep_for(double seconds) {
  if (seconds <= 0) return;
  struct timespec time = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
  nanosleep(&time, NULL);
}

static int has_within(int fd, short event, double until_s) {
  double left_s = until_s - now_s();
  struct pollfd wanted = {.fd = fd, .events = event};
  return left_s > 0 && poll(&wanted, 1, (int)(left_s * 1e3) + 1) == 1 && (wanted.revents & event);
}

/* An address as connect takes it. */
static socklen_t to_socket_address(const struct in6_addr *at, in_port_t port, struct sockaddr_storage *out) {
  memset(out, 0, sizeof *out);
  if (IN6_IS_ADDR_V4MAPPED(at)) {
    struct sockaddr_in *in = (struct sockaddr_in *)out;
    in->sin_family = AF_INET;
    in->sin_port = port;
    memcpy(&in->sin_addr, &at->s6_addr[12], 4);
    return sizeof *in;
  }
  struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)out;
  in6->sin6_family = AF_INET6;
  in6->sin6_port = port;
  in6->sin6_addr = *at;
  return sizeof *in6;
}

static int greets(int fd, const struct sockaddr_storage *where, socklen_t length, double until_s) {
  int failed = 0;
  socklen_t size = sizeof failed;
  char byte;
  if (connect(fd, (const struct sockaddr *)where, length) != 0) {
    if (errno != EINPROGRESS || !has_within(fd, POLLOUT, until_s)) return 0;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &failed, &size) != 0 || failed != 0) return 0;
  }
  if (send(fd, GREETING, sizeof GREETING - 1, MSG_NOSIGNAL) < 0) return 0;
  return has_within(fd, POLLIN, until_s) && recv(fd, &byte, 1, MSG_DONTWAIT) == 1;
}

/* Whether the worker's server says anything until then. */
static int answers(const struct peer *peer, double until_s) {
  for (int i = 0; i < peer->count; i++) {
    struct sockaddr_storage where;
    socklen_t length = to_socket_address(&peer->at[i], peer->port, &where);
    int fd = socket(where.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) continue;
    int greeted = greets(fd, &where, length, until_s);
    close(fd);
    if (greeted) return 1;
  }
  return 0;
}

static int is_to(const struct peer *peer, const struct sockaddr_storage *there) {
  struct in6_addr at;
  in_port_t port;
  memset(&at, 0, sizeof at);
  if (there->ss_family == AF_INET) {
    const struct sockaddr_in *in = (const struct sockaddr_in *)there;
    at.s6_addr[10] = at.s6_addr[11] = 0xff;
    memcpy(&at.s6_addr[12], &in->sin_addr, 4);
    port = in->sin_port;
  } else if (there->ss_family == AF_INET6) {
    at = ((const struct sockaddr_in6 *)there)->sin6_addr;
    port = ((const struct sockaddr_in6 *)there)->sin6_port;
  } else {
    return 0;
  }
  for (int i = 0; i < peer->count; i++)
    if (port == peer->port && memcmp(&at, &peer->at[i], sizeof at) == 0) return 1;
  return 0;
}

/* Closes this process' connections to the worker; how many. */
static int cut(const struct peer *peer) {
  DIR *all = opendir("/proc/self/fd");
  int count = 0;
  if (all == NULL) return 0;
  for (struct dirent *entry; (entry = readdir(all)) != NULL;) {
    char *end;
    long number = strtol(entry->d_name, &end, 10);
    if (end == entry->d_name || *end != '\0' || number == dirfd(all)) continue;
    /* A copy: its owner may close the descriptor, and another file be given the number. */
    int copy = fcntl((int)number, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) continue;
    struct sockaddr_storage there;
    socklen_t length = sizeof there;
    if (getpeername(copy, (struct sockaddr *)&there, &length) == 0 && is_to(peer, &there))
      count += shutdown(copy, SHUT_RDWR) == 0;
    close(copy);
  }
  closedir(all);
  return count;
}

static double least(double a, double b) { return a < b ? a : b; }

static void *watch(void *given) {
  struct peer *peer = given;
  const double interval_s = peer->silence_s / QUESTIONS;
  const double answer_s = least(peer->silence_s, MOST_ANSWER_S);
  double answered_s = now_s();
  while (!atomic_load(&peer->ended)) {
    double began_s = now_s(), lost_s = answered_s + peer->silence_s;
    if (began_s >= lost_s) break;
    if (answers(peer, least(began_s + answer_s, lost_s))) answered_s = now_s();
    sleep_for(least(interval_s, answered_s + peer->silence_s - now_s()));
    /* This process itself was stopped (Ctrl-Z), and nobody was asked. */
    if (now_s() - began_s > answer_s + 2 * interval_s) answered_s = now_s();
  }
  while (!atomic_load(&peer->ended)) {
    atomic_store(&peer->silent, 1);
    cut(peer); /* again and again: TensorFlow may connect, and wait, again */
    sleep_for(CUT_AGAIN_S);
  }
  free(peer);
  return NULL;
}

static struct peer *new_peer(const char *const *addresses, int count, int port) {
  struct peer *peer = calloc(1, sizeof *peer);
  if (peer == NULL) return NULL;
  peer->port = htons((in_port_t)port);
  for (int i = 0; i < count && peer->count < MOST_ADDRESSES; i++) {
    struct in6_addr *at = &peer->at[peer->count];
    struct in_addr v4;
    if (inet_pton(AF_INET, addresses[i], &v4) == 1) {
      at->s6_addr[10] = at->s6_addr[11] = 0xff;
      memcpy(&at->s6_addr[12], &v4, 4);
    } else if (inet_pton(AF_INET6, addresses[i], at) != 1) {
      continue;
    }
    peer->count++;
  }
  return peer;
}

/* A thread of no one; 0, or why there is none. */
static int start(void *(*function)(void *), void *given) {
  pthread_t thread;
  sigset_t every, before;
  sigfillset(&every); /* Python's handlers run in other threads */
  pthread_sigmask(SIG_BLOCK, &every, &before);
  int failed = pthread_create(&thread, NULL, function, given);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (!failed) pthread_detach(thread);
  return failed;
}

/* Watches from now on who listens at these addresses and this port (host order); NULL: no thread. */
void *ooo_watch(const char *const *addresses, int count, int port, double silence_s) {
  struct peer *peer = new_peer(addresses, count, port);
  if (peer == NULL) return NULL;
  peer->silence_s = silence_s;
  if (start(watch, peer) == 0) return peer;
  free(peer);
  return NULL;
}

/* Whether it has been silent for too long: then its connections are closed, again and again. */
int ooo_silent(void *peer) { return atomic_load(&((struct peer *)peer)->silent); }

/* Nobody may use the peer afterwards. */
void ooo_unwatch(void *peer) { atomic_store(&((struct peer *)peer)->ended, 1); }

/* Closes this process' connections to these addresses and this port; how many. */
int ooo_cut(const char *const *addresses, int count, int port) {
  struct peer *peer = new_peer(addresses, count, port);
  int closed = peer == NULL ? 0 : cut(peer);
  free(peer);
  return closed;
}

struct pulse {
  int fd;
  double interval_s;
};

/* Other errors pass, such as a buffer that is full. */
static int has_ended(int error) {
  return error == EPIPE || error == ECONNRESET || error == ENOTCONN || error == EBADF || error == ETIMEDOUT;
}

static void *beat(void *given) {
  struct pulse *pulse = given;
  while (send(pulse->fd, "\n", 1, MSG_NOSIGNAL | MSG_DONTWAIT) == 1 || !has_ended(errno))
    sleep_for(pulse->interval_s);
  close(pulse->fd);
  free(pulse);
  return NULL;
}

/* Sends an empty line again and again, as long as somebody is at the other end: this process lives. */
void ooo_pulse(int fd, double interval_s) {
  struct pulse *pulse = calloc(1, sizeof *pulse);
  if (pulse == NULL) return;
  pulse->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0); /* its owner may close it, and another file be given the number */
  pulse->interval_s = interval_s;
  if (pulse->fd >= 0 && start(beat, pulse) == 0) return;
  close(pulse->fd);
  free(pulse);
}

enum { GONE, SILENT, TOLD_GONE, TOLD_SILENT, TEXTS };

struct other {
  int fd;
  char *texts[TEXTS]; /* what is said of it, and to the others; NULL: its silence says nothing */
  double lost_s;       /* for how long it has been lost */
};

struct needed {
  int count;
  double silence_s, wait_s;
  atomic_int ended;
  struct other others[];
};

static const double LOOK_S = 0.1;
static const int ABORTED_LOOKS = 10;
static struct needed *_Atomic in_need;
static struct sigaction before_need;

/* GONE or SILENT, or -1 for one that is neither. */
static int why_lost(const struct other *other, double silence_s) {
  struct pollfd end = {.fd = other->fd, .events = POLLRDHUP};
  struct tcp_info info;
  socklen_t size = sizeof info;
  if (poll(&end, 1, 0) == 1 && end.revents != 0) return GONE;
  if (other->texts[SILENT] == NULL || getsockopt(other->fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return -1;
  return info.tcpi_last_data_recv * 1e-3 > silence_s ? SILENT : -1;
}

/* Nothing here but what a handler of signals may do. */
static void end_without(const struct needed *needed, int lost, int why) {
  const char *said = needed->others[lost].texts[why], *told = needed->others[lost].texts[TOLD_GONE + why];
  for (int i = 0; i < needed->count; i++)
    if (i != lost) send(needed->others[i].fd, told, strlen(told), MSG_NOSIGNAL | MSG_DONTWAIT);
  if (write(STDERR_FILENO, said, strlen(said)) < 0) _exit(1);
  _exit(1);
}

/* What it looks at is never freed: a handler may be looking, too. */
static void *look_after(void *given) {
  struct needed *needed = given;
  while (!atomic_load(&needed->ended)) {
    for (int i = 0; i < needed->count; i++) {
      struct other *other = &needed->others[i];
      int why = why_lost(other, needed->silence_s);
      other->lost_s = why < 0 ? 0 : other->lost_s + LOOK_S;
      if (other->lost_s >= needed->wait_s) end_without(needed, i, why);
    }
    sleep_for(LOOK_S);
  }
  return NULL;
}

/* A library aborts (Gloo's exceptions in a thread of its own): because another process is lost, or not. */
static void aborted(int number) {
  struct needed *needed = atomic_load(&in_need);
  for (int look = 0; needed != NULL && look < ABORTED_LOOKS; look++) {
    for (int i = 0; i < needed->count; i++) {
      int why = why_lost(&needed->others[i], needed->silence_s);
      if (why >= 0) end_without(needed, i, why);
    }
    sleep_for(LOOK_S);
  }
  sigaction(number, &before_need, NULL);
  raise(number);
}

/* This process ends where the other end of one of these connections has gone or is silent: `wait_s` after that
 * is noticed, with the text for it.
 *
 * Of each there are TEXTS texts in a row: what is said, and what is sent to the others. */
void *ooo_need(const int *fds, const char *const *texts, int count, double silence_s, double wait_s) {
  struct needed *needed = calloc(1, sizeof *needed + (size_t)count * sizeof(struct other));
  if (needed == NULL) return NULL;
  needed->silence_s = silence_s, needed->wait_s = wait_s;
  for (; needed->count < count; needed->count++) {
    struct other *other = &needed->others[needed->count];
    other->fd = fds[needed->count];
    for (int i = 0; i < TEXTS; i++, texts++) {
      other->texts[i] = *texts == NULL ? NULL : strdup(*texts);
      if (*texts != NULL && other->texts[i] == NULL) return NULL;
    }
  }
  if (start(look_after, needed) != 0) return NULL;
  struct sigaction ours = {.sa_handler = aborted};
  atomic_store(&in_need, needed);
  sigaction(SIGABRT, &ours, &before_need);
  return needed;
}

void ooo_needed_no_more(void *needed) {
  if (needed == NULL) return;
  sigaction(SIGABRT, &before_need, NULL);
  atomic_store(&in_need, NULL);
  atomic_store(&((struct needed *)needed)->ended, 1);
}

static double free_s;
static atomic_int freeing;

static void *end(void *given) {
  static const char said[] =
      "tf_ooo: this process is ended: other processes are lost, and a library still waits for them\n";
  (void)given;
  while (!atomic_load(&freeing)) sleep_for(0.05);
  sleep_for(free_s);
  if (write(STDERR_FILENO, said, sizeof said - 1) < 0) _exit(1);
  _exit(1);
}

/* This process ends so many seconds after ooo_freeing was called, if it is still there. */
void ooo_end_in_time(double seconds) {
  free_s = seconds;
  start(end, NULL);
}

void ooo_freeing(void) { atomic_store(&freeing, 1); }
