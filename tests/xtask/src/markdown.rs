//! As much of Markdown as the documents use: fenced blocks and links.

use std::iter;
use std::ops::Range;

/// Lines with their numbers, and whether each is in a fenced block.
pub fn fenced(text: &str) -> impl Iterator<Item = (usize, &str, bool)> {
    let mut in_fence = false;
    text.lines().zip(1..).map(move |(line, number)| {
        let is_fence = line.trim_start().starts_with("```");
        let was = in_fence;
        in_fence ^= is_fence;
        (number, line, was || is_fence)
    })
}

/// Fenced blocks: the words behind the fence, and the lines, without what the fence is indented by.
pub fn blocks(text: &str) -> Vec<(&str, String)> {
    let mut blocks: Vec<(&str, String)> = Vec::new();
    let mut indent = None;
    for line in text.lines() {
        let bare = line.trim_start();
        match (bare.strip_prefix("```"), indent) {
            (Some(words), None) => {
                indent = Some(line.len() - bare.len());
                blocks.push((words.trim(), String::new()));
            }
            (Some(_), Some(_)) => indent = None,
            (None, Some(indent)) => {
                if let Some((_, block)) = blocks.last_mut() {
                    block.push_str(line.get(indent..).unwrap_or_default());
                    block.push('\n');
                }
            }
            (None, None) => {}
        }
    }
    blocks
}

/// A fenced block that a scenario runs as it stands: one of whose words is `run=SCENARIO/NAME`.
#[derive(Debug, PartialEq, Eq)]
pub struct Marked<'a> {
    pub scenario: &'a str,
    /// By which the scenario asks for it: `SCENARIO/NAME`.
    pub name: &'a str,
    pub block: String,
}

/// The blocks that scenarios run. The mark is behind the language and a space, where renderers show
/// nothing of it.
pub fn marked(text: &str) -> Vec<Marked<'_>> {
    let blocks = blocks(text).into_iter();
    let marked = blocks.filter_map(|(words, block)| {
        let mut words = words.split_whitespace();
        let name = words.find_map(|word| word.strip_prefix("run="))?;
        let (scenario, _) = name.split_once('/').unwrap_or((name, ""));
        Some(Marked {
            scenario,
            name,
            block,
        })
    });
    marked.collect()
}

/// Where in a line the targets of links within the checkout stand.
pub fn targets(line: &str) -> impl Iterator<Item = Range<usize>> + '_ {
    let mut at = 0;
    let all = iter::from_fn(move || {
        let begin = at + line[at..].find("](")? + 2;
        let end = begin + line[begin..].find(')')?;
        at = end;
        Some(begin..end)
    });
    all.filter(|range| !line[range.clone()].contains("://"))
}

#[test]
fn targets_are_found_where_they_stand() {
    let line = "[a](b.md#c), [d](https://e) and [f](g.md)";
    let found: Vec<&str> = targets(line).map(|range| &line[range]).collect();
    assert_eq!(found, ["b.md#c", "g.md"]);
}

#[test]
fn blocks_are_found_without_what_they_are_indented_by() {
    let text = "a\n```toml\none\n```\nb\n  ```\n  two\n    three\n\n  ```\n";
    let blocks = blocks(text);
    assert_eq!(
        blocks,
        [
            ("toml", "one\n".to_owned()),
            ("", "two\n  three\n\n".to_owned())
        ]
    );
}

#[test]
fn marked_blocks_are_found_by_their_words() {
    let text = "```sh\na\n```\n  ```sh run=blk/first\n  b\n  ```\n";
    let block = "b\n".to_owned();
    let (scenario, name) = ("blk", "blk/first");
    let expected = Marked {
        scenario,
        name,
        block,
    };
    assert_eq!(marked(text), [expected]);
}
