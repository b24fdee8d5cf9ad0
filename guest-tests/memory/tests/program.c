/* What a program sees of the library on a machine without EGM memory; tests/c.rs compiles and runs it. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "egm_memory.h"

int main(void)
{
    struct egm_memory memory;
    struct egm_span span;
    int none, wrong, closed;

    memset(&memory, 0, sizeof memory);
    none = egm_memory_open("ffff:ff:1f.7", &memory);
    wrong = egm_memory_open("gpu0", &memory);
    closed = egm_memory_retired(&memory, &span, 1);
    egm_memory_close(&memory);
    egm_memory_close(NULL);
    printf("%s, %s, %s, ", none == -ENODEV ? "ENODEV" : "?", wrong == -EINVAL ? "EINVAL" : "?",
           closed == -EINVAL ? "EINVAL" : "?");
    printf("%zu and %zu bytes\n", sizeof memory, sizeof span);
    return 0;
}
