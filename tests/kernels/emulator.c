/* Run one function of routing.c on memory of another machine: how tests run it on an emulated CPU.

   usage: emulator route|learn|backward < memory > memory

   The input is a `struct job` whose pointers are addresses of the machine that wrote it, then the
   regions of memory that they point into: address, number of bytes and bytes. The output is the
   bytes of all regions afterwards. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "routing.c"

#define MAX_REGIONS 16

static void read_exactly(void *to, size_t bytes)
{
    if (fread(to, 1, bytes, stdin) != bytes) exit(2);
}

int main(int count, char **arguments)
{
    struct job job;
    uint64_t address[MAX_REGIONS], bytes[MAX_REGIONS], words[sizeof job / 8];
    char *memory[MAX_REGIONS];
    int regions = 0;
    if (count != 2) return 2;
    read_exactly(&job, sizeof job);
    while (regions < MAX_REGIONS && fread(address + regions, 8, 1, stdin) == 1) {
        read_exactly(bytes + regions, 8);
        memory[regions] = malloc(bytes[regions] + 1);
        read_exactly(memory[regions], bytes[regions]);
        regions++;
    }
    /* Sizes and strides are far below any address. */
    memcpy(words, &job, sizeof job);
    for (size_t n = 0; n < sizeof words / 8; n++)
        for (int r = 0; r < regions; r++)
            if (words[n] >= address[r] && words[n] <= address[r] + bytes[r]) {
                words[n] = (uint64_t)(memory[r] + (words[n] - address[r]));
                break;
            }
    memcpy(&job, words, sizeof job);
    if (!strcmp(arguments[1], "route")) while (route(&job, 0)) continue;
    else if (!strcmp(arguments[1], "learn")) while (learn(&job, 0)) continue;
    else if (!strcmp(arguments[1], "backward")) while (backward(&job, 0)) continue;
    else return 2;
    for (int r = 0; r < regions; r++) fwrite(memory[r], 1, bytes[r], stdout);
    return 0;
}
