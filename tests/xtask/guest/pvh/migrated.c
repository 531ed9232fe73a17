// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * A guest to be migrated while it writes its memory: a round looks at each page, which must have what the round before has
 * written there, and writes it anew. It says each round that it has gone through, and at a page that is wrong it stops.
 */
#include "machine.h"

/* Above the program and its pool, and below the end of a machine of 128 MiB; a page in 8 is written in each round alone. */
#define FIRST (32UL << 20)
#define PAGES 16384UL
#define WORDS (PAGE / sizeof(uint64_t))
#define STRIDE 8
#define STILL_ROUND 1

/* What a word of a page has after a round. */
static uint64_t word_of(uint64_t round, uint64_t page, uint64_t word)
{
	uint64_t value = (round * PAGES + page) * WORDS + word + 1;

	value *= 0x9e3779b97f4a7c15UL;
	return value ^ value >> 29;
}

static uint64_t *page_at(uint64_t page)
{
	return (uint64_t *)(FIRST + page * PAGE);
}

static void write_page(uint64_t round, uint64_t page)
{
	uint64_t *words = page_at(page);

	for (uint64_t word = 0; word < WORDS; word++)
		words[word] = word_of(round, page, word);
}

static void check_page(uint64_t round, uint64_t page, uint64_t now)
{
	const uint64_t *words = page_at(page);

	for (uint64_t word = 0; word < WORDS; word++)
		if (words[word] != word_of(round, page, word)) {
			say("bad page %u in round %u: word %u is 0x%lx", (unsigned int)page, (unsigned int)now,
			    (unsigned int)word, (unsigned long)words[word]);
			for (;;)
				__asm__ volatile("hlt");
		}
}

void main(void)
{
	for (uint64_t page = 0; page < PAGES; page++)
		write_page(STILL_ROUND, page);
	say("ready");
	for (uint64_t round = STILL_ROUND + 1;; round++) {
		for (uint64_t page = 0; page < PAGES; page++) {
			bool is_written = page % STRIDE == 0;

			check_page(is_written ? round - 1 : STILL_ROUND, page, round);
			if (is_written)
				write_page(round, page);
		}
		say("round %u", (unsigned int)round);
	}
}
