//! Links in Markdown, as far as the documents use it.

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
