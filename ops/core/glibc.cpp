// Replacements for symbols of new versions of glibc, so that the wheel runs from glibc 2.28 on.
#include <features.h>

#if defined(__GLIBC__) && (defined(__x86_64__) || defined(__aarch64__))

#if __GLIBC_PREREQ(2, 32)
// Read by std::shared_ptr. False: counts are always atomic, as PyTorch starts threads.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;
#endif

#if __GLIBC_PREREQ(2, 34)
// Before 2.34 it is in libdl, which PyTorch links.
#ifdef __x86_64__
__asm__(".symver old_dlsym, dlsym@GLIBC_2.2.5");
#else
__asm__(".symver old_dlsym, dlsym@GLIBC_2.17");
#endif
extern "C" void* old_dlsym(void* handle, const char* name) noexcept;
extern "C" void* dlsym(void* handle, const char* name) noexcept {
  return old_dlsym(handle, name);
}
#endif

#endif
