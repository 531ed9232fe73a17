//! The page about libvirt: what stands in its fenced blocks is what the scenario uses.

use std::fs;

use anyhow::{Context as _, Result};
use farlane_kit::workspace::Workspace;

use crate::markdown::blocks;

/// The page.
const PAGE: &str = "docs/libvirt.md";

/// Its text.
pub struct Page(String);

impl Page {
    pub fn read(workspace: &Workspace) -> Result<Self> {
        let path = workspace.root().join(PAGE);
        let text = fs::read_to_string(path).with_context(|| format!("Cannot read {PAGE}"))?;
        Ok(Self(text))
    }

    /// The XML of a section.
    pub fn xml(&self, section: &str) -> Result<String> {
        self.block("xml", &format!("\n## {section}\n"))
            .with_context(|| format!("{PAGE} has no XML in {section:?}"))
    }

    /// The file whose path stands before it.
    pub fn file(&self, path: &str) -> Result<String> {
        self.block("toml", path)
            .with_context(|| format!("{PAGE} has no file {path}"))
    }

    /// The first block of a section without a language that has these words.
    pub fn lines(&self, section: &str, words: &str) -> Result<String> {
        let section = format!("\n## {section}\n");
        let found = self.0.split_once(&section).and_then(|(_, rest)| {
            let section = rest.split("\n## ").next()?;
            let mut blocks = blocks(section).into_iter();
            blocks.find_map(|(language, block)| {
                (language.is_empty() && block.contains(words)).then_some(block)
            })
        });
        found.with_context(|| format!("{PAGE} has no lines with {words:?} in {section:?}"))
    }

    /// The first block of a language behind a text, in the same section.
    fn block(&self, language: &str, behind: &str) -> Option<String> {
        let (_, rest) = self.0.split_once(behind)?;
        let section = rest.split("\n## ").next()?;
        let mut blocks = blocks(section).into_iter();
        blocks.find_map(|(words, block)| (words == language).then_some(block))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_by_what_stands_before() {
        let text = "# t\n## One\n`/a`:\n```toml\none\n```\n```xml\n<disk/>\n```\n## Two\n`/b`:\n\
                    ```toml\ntwo\n```\n## Three\n```xml\n<net/>\n```\n";
        let page = Page(text.to_owned());
        assert_eq!(page.xml("One").unwrap(), "<disk/>\n");
        assert_eq!(page.xml("Three").unwrap(), "<net/>\n");
        assert_eq!(page.file("`/a`").unwrap(), "one\n");
        assert_eq!(page.file("`/b`").unwrap(), "two\n");
        assert!(page.xml("Two").is_err() && page.file("`/c`").is_err());
    }
}
