/* sink ADDRESS PORT CONNECTIONS SILENT_S REQUEST: sends the request in this file over each of so
 * many connections and reads all replies, for less processor time than a client that parses them.
 *
 * Says "ready" once all are connected, and begins when its input is closed. The request asks the
 * server to close the connection behind the reply, and for a last event with the usage. Writes one
 * line of JSON; exits with 1 after so many seconds without a byte.
 *
 * Counts lines that begin with "data:". A server that cuts a chunk of HTTP within that word has
 * fewer of them counted. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { TAIL = 1024, BUFFER = 1 << 18, EVENTS = 512, MOST_REQUEST = 1 << 20 };

struct connection {
  int file;
  int matched;        /* characters of MARK that its bytes end with */
  size_t sent, size;  /* bytes of the request, and in `tail` */
  char status[13];    /* "HTTP/1.1 200" */
  size_t status_size;
  char tail[TAIL + 1]; /* the last bytes of the reply */
};

static const char MARK[] = "\ndata:";
static long long num_bytes, num_events, num_tokens;
static int num_whole;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

static double cpu_s(void) {
  struct rusage used;
  getrusage(RUSAGE_SELF, &used);
  return used.ru_utime.tv_sec + used.ru_stime.tv_sec +
         (used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
}

static void fail(const char *what) {
  fprintf(stderr, "sink: %s: %s\n", what, strerror(errno));
  exit(1);
}

static void count_events(struct connection *own, const char *at, const char *end) {
  while (at < end) {
    if (!own->matched) {
      if (!(at = memchr(at, '\n', end - at))) return;
      at++, own->matched = 1;
    } else if (*at == MARK[own->matched]) {
      at++;
      if (++own->matched == sizeof MARK - 1) num_events++, own->matched = 0;
    } else {
      own->matched = 0; /* and look at it again: it may be the end of a line */
    }
  }
}

static void keep_tail(struct connection *own, const char *data, size_t size) {
  if (size > TAIL) data += size - TAIL, size = TAIL;
  size_t left = own->size + size > TAIL ? TAIL - size : own->size;
  memmove(own->tail, own->tail + own->size - left, left);
  memcpy(own->tail + left, data, size);
  own->tail[own->size = left + size] = 0;
}

static void take(struct connection *own, const char *data, size_t size) {
  num_bytes += size;
  for (size_t i = 0; i < size && own->status_size < sizeof own->status - 1; i++)
    own->status[own->status_size++] = data[i];
  count_events(own, data, data + size);
  keep_tail(own, data, size);
}

/* A reply is whole with its last event, which begins a line, as no text within JSON does; what it
 * says of tokens is its usage. */
static void end(struct connection *own) {
  static const char name[] = "\"completion_tokens\":";
  const char *at = strstr(own->tail, name);
  if (!strcmp(own->status, "HTTP/1.1 200") && strstr(own->tail, "\ndata: [DONE]") && at) {
    num_whole++;
    num_tokens += atoll(at + sizeof name - 1);
  }
  close(own->file);
}

static int connect_to(const char *address, const char *port) {
  struct sockaddr_in place = {.sin_family = AF_INET, .sin_port = htons(atoi(port))};
  if (inet_pton(AF_INET, address, &place.sin_addr) != 1) fail("no address of IPv4");
  int file = socket(AF_INET, SOCK_STREAM, 0);
  if (file < 0 || connect(file, (struct sockaddr *)&place, sizeof place)) fail("cannot connect");
  if (fcntl(file, F_SETFL, O_NONBLOCK)) fail("fcntl");
  return file;
}

int main(int argc, char **argv) {
  static char request[MOST_REQUEST], buffer[BUFFER];
  if (argc != 6) return fprintf(stderr, "sink ADDRESS PORT CONNECTIONS SILENT_S REQUEST\n"), 2;
  int count = atoi(argv[3]), silent_ms = atof(argv[4]) * 1000, left = count;
  FILE *asked = fopen(argv[5], "rb");
  if (!asked) fail(argv[5]);
  size_t length = fread(request, 1, sizeof request, asked);
  struct rlimit files;
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  struct connection *all = calloc(count, sizeof *all);
  int poll = epoll_create1(0);
  for (int i = 0; i < count; i++) {
    struct epoll_event wanted = {.events = EPOLLIN | EPOLLOUT, .data.ptr = &all[i]};
    all[i].file = connect_to(argv[1], argv[2]);
    if (epoll_ctl(poll, EPOLL_CTL_ADD, all[i].file, &wanted)) fail("epoll_ctl");
  }
  puts("ready");
  fflush(stdout);
  while (read(0, buffer, 1) > 0) continue;

  double began = now(), used = cpu_s(), first = 0;
  while (left) {
    struct epoll_event events[EVENTS];
    int ready = epoll_wait(poll, events, EVENTS, silent_ms);
    if (ready < 0 && errno == EINTR) continue;
    if (ready < 0) fail("epoll_wait");
    if (!ready) return fprintf(stderr, "sink: %d replies: nothing came for long\n", left), 1;
    for (int i = 0; i < ready; i++) {
      struct connection *own = events[i].data.ptr;
      if (own->sent < length) {
        ssize_t sent = send(own->file, request + own->sent, length - own->sent, MSG_NOSIGNAL);
        own->sent += sent > 0 ? sent : 0;
        struct epoll_event wanted = {.events = EPOLLIN, .data.ptr = own};
        if (own->sent == length) epoll_ctl(poll, EPOLL_CTL_MOD, own->file, &wanted);
      }
      if (!(events[i].events & ~EPOLLOUT)) continue;
      ssize_t size = read(own->file, buffer, sizeof buffer);
      if (size < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (size > 0) {
        if (!first) first = now();
        take(own, buffer, size);
      } else {
        end(own);
        left--;
      }
    }
  }
  double seconds = now() - began;
  printf("{\"whole\": %d, \"bytes\": %lld, \"events\": %lld, \"tokens\": %lld, "
         "\"first_s\": %.6f, \"seconds\": %.6f, \"cpu_s\": %.6f}\n",
         num_whole, num_bytes, num_events, num_tokens, first ? first - began : 0, seconds, cpu_s() - used);
  return 0;
}
