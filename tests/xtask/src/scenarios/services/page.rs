//! What the page about installation has its readers run.

use anyhow::{Context as _, Result};

/// The lines between fences of the page's only block that has these words.
pub fn block(page: &str, words: &str) -> Result<String> {
    let blocks = page.split("```").skip(1).step_by(2);
    let mut found = blocks.filter(|block| block.contains(words));
    let block = found.next().filter(|_| found.next().is_none());
    let block = block.with_context(|| format!("Not one block of the page has {words}"))?;
    Ok(block
        .lines()
        .map(|line| format!("{}\n", line.trim()))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_block_with_the_words_is_found_without_what_it_is_indented_by() {
        let page = "a\n```\none\n```\nb\n  ```\n  two\n  three\n  ```\n";
        assert_eq!(block(page, "three").unwrap().trim(), "two\nthree");
        assert!(block(page, "b\n").is_err(), "that is no block");
        assert!(block(page, "o").is_err(), "those are two");
    }
}
