/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/* An allocator that maps each piece of memory, and unmaps it when it is freed. */

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096ul

struct piece { /* lies before what the program has */
	void *base;
	size_t mapped;
	size_t bytes;
};

static void *allocate(size_t alignment, size_t bytes)
{
	size_t mapped = bytes + alignment + PAGE;
	char *base = mmap(0, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uintptr_t at;

	if (base == MAP_FAILED || mapped < bytes) {
		errno = ENOMEM;
		return 0;
	}
	at = ((uintptr_t)base + sizeof(struct piece) + alignment - 1) / alignment * alignment;
	((struct piece *)at)[-1] = (struct piece){ base, mapped, bytes };
	return (void *)at;
}

void *malloc(size_t bytes)
{
	return allocate(64, bytes);
}

void *calloc(size_t count, size_t bytes)
{
	return allocate(64, count * bytes);
}

void free(void *at)
{
	int saved = errno;
	struct piece *piece = (struct piece *)at - 1;

	if (at)
		munmap(piece->base, piece->mapped);
	errno = saved;
}

void *realloc(void *at, size_t bytes)
{
	void *other = malloc(bytes);

	if (at && other) {
		size_t before = ((struct piece *)at - 1)->bytes;

		memcpy(other, at, before < bytes ? before : bytes);
		free(at);
	}
	return other;
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
	return allocate(alignment < 64 ? 64 : alignment, bytes);
}

void *memalign(size_t alignment, size_t bytes)
{
	return aligned_alloc(alignment, bytes);
}

int posix_memalign(void **at, size_t alignment, size_t bytes)
{
	*at = aligned_alloc(alignment, bytes);
	return *at ? 0 : ENOMEM;
}
