/* Checks the type of every function; this program does not link if a function is missing from the library. */
#include "check.h"

#include "../abi/functions.h"

int main(void) {
    CHECK(same_gc_version() == GRADCODEC_VERSION);
    CHECK(strcmp(same_gc_status_name(GC_STATUS_OK), "GC_STATUS_OK") == 0);
    CHECK(strcmp(same_gc_last_error(), "") == 0);
    puts("signatures: ok");
    return 0;
}
