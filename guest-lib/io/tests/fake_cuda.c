/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/*
 * A CUDA driver with one allocation of device memory, at addresses that neither the processor nor the kernel can use. The functions
 * are those of cuda.h that the I/O library calls; copies without the allocation's context fail, as they do in the driver.
 */
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#define SIZE (1 << 20)
#define SUCCESS 0
#define INVALID_VALUE 1
#define INVALID_CONTEXT 201

static char *device; /* the address */
static char content[SIZE];
static int context;
static __thread void *current;

/* Not CUDA's: allocates, frees, and tells what is in device memory. */
void *fake_allocate(void)
{
	device = mmap(0, SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	return device;
}

void fake_free(void)
{
	device = 0;
}

char *fake_content(void)
{
	return content;
}

static int inside(uint64_t at, size_t bytes)
{
	uint64_t start = (uintptr_t)device;

	return device && at >= start && at - start + bytes <= SIZE;
}

int cuPointerGetAttribute(void *data, int attribute, uint64_t at)
{
	if (!inside(at, 1))
		return INVALID_VALUE;
	if (attribute == 1)
		*(void **)data = &context;
	else if (attribute == 2)
		*(unsigned int *)data = 2;
	else
		return INVALID_VALUE;
	return SUCCESS;
}

int cuMemGetAddressRange_v2(uint64_t *start, size_t *size, uint64_t at)
{
	if (!inside(at, 1))
		return INVALID_VALUE;
	*start = (uintptr_t)device;
	*size = SIZE;
	return SUCCESS;
}

int cuCtxPushCurrent_v2(void *pushed)
{
	if (pushed != &context || current)
		return INVALID_CONTEXT;
	current = pushed;
	return SUCCESS;
}

int cuCtxPopCurrent_v2(void **popped)
{
	if (!current)
		return INVALID_CONTEXT;
	*popped = current;
	current = 0;
	return SUCCESS;
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes)
{
	if (current != &context)
		return INVALID_CONTEXT;
	if (!inside(to, bytes))
		return INVALID_VALUE;
	memcpy(content + (to - (uintptr_t)device), from, bytes);
	return SUCCESS;
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes)
{
	if (current != &context)
		return INVALID_CONTEXT;
	if (!inside(from, bytes))
		return INVALID_VALUE;
	memcpy(to, content + (from - (uintptr_t)device), bytes);
	return SUCCESS;
}
