/* EGM memory that this machine has as a PCI function. Link with libegm_memory.a -lpthread -ldl -lm.
 *
 * docs/guest-memory.md describes the memory, and how CUDA programs register it.
 */
#ifndef EGM_MEMORY_H
#define EGM_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct egm_memory {
    void *address;  /* the first byte, shared with everything else that maps it */
    uint64_t size;  /* bytes, retired ones included */
    uint64_t page;  /* bytes that further mappings of the file keep to */
    uint32_t pxm;   /* ACPI proximity domain, UINT32_MAX where none is known */
    int file;       /* file that it is mapped from, at offset 0; closed by egm_memory_close */
    void *handle;   /* the library's */
};

struct egm_span {
    uint64_t offset;  /* from the first byte of the memory */
    uint64_t size;    /* bytes */
};

/* Maps the memory of PCI function "0000:01:00.0", or of the first that has any and is not broken
 * where function is NULL.
 * Returns 0, or a negative error number and leaves *memory alone: -ENODEV where there is none, -EACCES where this user may
 * not open it, -EINVAL for what is no PCI address, -EIO where the device does not answer, or
 * reports impossible values. */
int egm_memory_open(const char *function, struct egm_memory *memory);

/* Writes spans of retired bytes, which read as ones and must not be used, to spans: ascending, most of them at most.
 * Returns how many there are, or a negative error number: -EIO where the device does not answer, -EINVAL for memory
 * that is not open. More are retired as pages go bad. */
int egm_memory_retired(const struct egm_memory *memory, struct egm_span *spans, size_t most);

/* Unmaps it, and closes its file. Nothing may use its addresses any more. */
void egm_memory_close(struct egm_memory *memory);

#ifdef __cplusplus
}
#endif

#endif
