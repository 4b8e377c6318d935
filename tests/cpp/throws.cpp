// An exception that leaves a callback, which the header forbids, ends the process: no caller catches it, and no call
// continues in a half-done state.
#include <gradcodec.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <sys/wait.h>
#include <unistd.h>

static void throwing(void *) { throw std::runtime_error("of a release"); }
static void throwing_legacy(DLManagedTensor *) { throw std::runtime_error("of a deleter"); }
static void throwing_versioned(DLManagedTensorVersioned *) { throw std::runtime_error("of a versioned deleter"); }

static unsigned char byte;
static int64_t length = 1;
static DLTensor view() { return {&byte, {kDLCPU, 0}, 1, {kDLUInt, 8, 1}, &length, nullptr, 0}; }

static void release() {
  DLManagedTensor *tensor;
  DLTensor of = view();
  gc_tensor_from_pointer(of.data, of.device, of.dtype, 1, &length, nullptr, throwing, nullptr, &tensor);
  gc_tensor_free(tensor);
}

static void deleter() {
  DLManagedTensor tensor = {view(), nullptr, throwing_legacy};
  gc_tensor_free(&tensor);
}

static void deleter_of_a_tensor_taken_over() {
  DLManagedTensor tensor = {view(), nullptr, throwing_legacy};
  DLManagedTensorVersioned *ours;
  gc_tensor_to_versioned(&tensor, &ours);
  ours->deleter(ours);
}

static void versioned_deleter_of_a_tensor_taken_over() {
  DLManagedTensorVersioned tensor;
  std::memset(&tensor, 0, sizeof tensor);
  tensor.version.major = 1;
  tensor.dl_tensor = view();
  tensor.deleter = throwing_versioned;
  DLManagedTensor *ours;
  gc_tensor_from_versioned(&tensor, &ours);
  gc_tensor_free(ours);
}

int main() {
  static const struct {
    const char *name;
    void (*call)();
  } calls[] = {{"a release", release},
               {"a deleter", deleter},
               {"the deleter of a tensor taken over", deleter_of_a_tensor_taken_over},
               {"the versioned deleter of a tensor taken over", versioned_deleter_of_a_tensor_taken_over}};
  int failed = 0;
  for (const auto &[name, call] : calls) {
    pid_t child = fork();
    if (child == 0) {
      // Hides the message that the C++ runtime prints before it aborts.
      if (!std::freopen("/dev/null", "w", stderr)) _exit(2);
      try {
        call();
      } catch (...) {
      }
      _exit(1);
    }
    int status;
    if (waitpid(child, &status, 0) != child || !WIFSIGNALED(status) || WTERMSIG(status) != SIGABRT) {
      std::fprintf(stderr, "throws: FAILED: the process goes on after an exception of %s\n", name);
      failed = 1;
    }
  }
  if (!failed) std::puts("throws: ok");
  return failed;
}
