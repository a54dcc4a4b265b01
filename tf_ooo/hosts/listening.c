/* Keeps a server that TensorFlow starts to one address.
 *
 * Its gRPC server asks for "0.0.0.0:port" whatever address the cluster names, so that a worker on
 * 127.0.0.1 can be reached from everywhere.  TensorFlow's libraries call `bind` through a slot of their own;
 * the slot is pointed at `bind_to_one`, which narrows that one request and hands on all others. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <netinet/in.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct in6_addr address; /* IPv4 as ::ffff:a.b.c.d */
static in_port_t wanted_port;   /* in network order; 0: nothing is narrowed */
static int narrowed;

static int is_v4(void) { return IN6_IS_ADDR_V4MAPPED(&address); }

/* Whether the request is for the port at all addresses; if so, `out` is the one for the address. */
static int narrow(const struct sockaddr *asked, socklen_t length, struct sockaddr_storage *out) {
  memset(out, 0, sizeof *out);
  if (asked->sa_family == AF_INET6 && length >= sizeof(struct sockaddr_in6)) {
    struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)out;
    memcpy(in6, asked, sizeof *in6);
    struct in6_addr mapped_any = {0};
    mapped_any.s6_addr[10] = mapped_any.s6_addr[11] = 0xff;
    int is_any = IN6_IS_ADDR_UNSPECIFIED(&in6->sin6_addr) ||
                 memcmp(&in6->sin6_addr, &mapped_any, sizeof mapped_any) == 0;
    if (!is_any || in6->sin6_port != wanted_port) return 0;
    in6->sin6_addr = address;
    return 1;
  }
  if (asked->sa_family == AF_INET && length >= sizeof(struct sockaddr_in)) {
    struct sockaddr_in *in = (struct sockaddr_in *)out;
    memcpy(in, asked, sizeof *in);
    if (in->sin_addr.s_addr != htonl(INADDR_ANY) || in->sin_port != wanted_port || !is_v4()) return 0;
    memcpy(&in->sin_addr, &address.s6_addr[12], 4);
    return 1;
  }
  return 0;
}

static int bind_to_one(int fd, const struct sockaddr *asked, socklen_t length) {
  struct sockaddr_storage one;
  pthread_mutex_lock(&lock);
  int is_ours = wanted_port != 0 && asked != NULL && narrow(asked, length, &one);
  narrowed += is_ours;
  pthread_mutex_unlock(&lock);
  return bind(fd, is_ours ? (const struct sockaddr *)&one : asked, length);
}

/* Points the library's slot for `bind` here; the number of slots that were found. */
static int patch(struct dl_phdr_info *info, size_t size, void *found) {
  (void)size;
  if (info->dlpi_name == NULL || strstr(info->dlpi_name, "libtensorflow") == NULL) return 0;
  const ElfW(Dyn) *dynamic = NULL;
  for (int i = 0; i < info->dlpi_phnum; i++)
    if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
      dynamic = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
  const char *strings = NULL;
  const ElfW(Sym) *symbols = NULL;
  const ElfW(Rela) *jumps = NULL;
  size_t bytes = 0;
  for (; dynamic != NULL && dynamic->d_tag != DT_NULL; dynamic++) {
    if (dynamic->d_tag == DT_STRTAB) strings = (const char *)dynamic->d_un.d_ptr;
    if (dynamic->d_tag == DT_SYMTAB) symbols = (const ElfW(Sym) *)dynamic->d_un.d_ptr;
    if (dynamic->d_tag == DT_JMPREL) jumps = (const ElfW(Rela) *)dynamic->d_un.d_ptr;
    if (dynamic->d_tag == DT_PLTRELSZ) bytes = dynamic->d_un.d_val;
  }
  if (strings == NULL || symbols == NULL || jumps == NULL) return 0;
  long page = sysconf(_SC_PAGESIZE);
  for (size_t i = 0; i < bytes / sizeof *jumps; i++) {
    const ElfW(Sym) *symbol = &symbols[ELF64_R_SYM(jumps[i].r_info)];
    if (strcmp(strings + symbol->st_name, "bind") != 0) continue;
    void **slot = (void **)(info->dlpi_addr + jumps[i].r_offset);
    char *start = (char *)((size_t)slot & ~(size_t)(page - 1));
    if (mprotect(start, (size_t)page, PROT_READ | PROT_WRITE) != 0) continue;
    *slot = (void *)bind_to_one;
    (*(int *)found)++;
  }
  return 0;
}

/* From now on the port (host order) is opened at this IPv4 or IPv6 address alone; the number of TensorFlow's
 * libraries that will keep to it, -1 if `text` is no address.  0 as port: as before. */
int ooo_listen_only(const char *text, int port) {
  struct in_addr v4;
  struct in6_addr v6;
  memset(&v6, 0, sizeof v6);
  if (inet_pton(AF_INET, text, &v4) == 1) {
    v6.s6_addr[10] = v6.s6_addr[11] = 0xff;
    memcpy(&v6.s6_addr[12], &v4, 4);
  } else if (inet_pton(AF_INET6, text, &v6) != 1) {
    return -1;
  }
  int found = 0;
  pthread_mutex_lock(&lock);
  address = v6;
  wanted_port = htons((in_port_t)port);
  narrowed = 0;
  pthread_mutex_unlock(&lock);
  dl_iterate_phdr(patch, &found);
  return found;
}

/* How often a request was narrowed since. */
int ooo_narrowed(void) {
  pthread_mutex_lock(&lock);
  int count = narrowed;
  pthread_mutex_unlock(&lock);
  return count;
}
