//! What is checked of a document: its prose, code, links, and anchors.

use std::collections::BTreeSet;

use crate::markdown::{fenced, targets};

/// Lines that are neither in a fenced block nor of a table, with their numbers.
pub fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = fenced(text).filter(|(_, _, in_fence)| !in_fence);
    let lines = lines.map(|(number, line, _)| (number, line));
    lines.filter(|(_, line)| !line.trim_start().starts_with('|'))
}

/// Inline code spans, and the commands in fenced blocks, each with its line's number.
pub fn code(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut is_open = false;
    for (number, line, in_fence) in fenced(text) {
        if in_fence {
            let command = line.split(" #").next().unwrap_or(line).trim();
            if command.starts_with("cargo ") {
                found.push((number, command));
            }
            continue;
        }
        // A span that a line's end cuts is read on neither line.
        let mut parts = line.split('`').skip(usize::from(is_open));
        parts.next();
        while let (Some(span), Some(_)) = (parts.next(), parts.next()) {
            found.push((number, span));
        }
        is_open ^= line.matches('`').count() % 2 == 1;
    }
    found
}

/// Targets of links within the checkout, with the numbers of their lines.
pub fn links(text: &str) -> Vec<(usize, &str)> {
    let lines = fenced(text).filter(|(_, _, in_fence)| !in_fence);
    lines
        .flat_map(|(number, line, _)| targets(line).map(move |range| (number, &line[range])))
        .collect()
}

/// The anchors of a document's headings.
pub fn anchors(text: &str) -> BTreeSet<String> {
    let headings = fenced(text).filter(|(_, line, in_fence)| !in_fence && line.starts_with('#'));
    headings
        .map(|(_, line, _)| {
            let title = line.trim_start_matches('#').trim().to_lowercase();
            let kept = title.chars().filter_map(|c| match c {
                ' ' => Some('-'),
                c if c.is_alphanumeric() || matches!(c, '-' | '_') => Some(c),
                _ => None,
            });
            kept.collect()
        })
        .collect()
}

#[test]
fn code_and_links_are_found() {
    let text =
        "# A `b` c\nsee `x y` and [z](p.md#q)\n```\ncargo t # no\n`n`\n```\n| `in a table` |\n";
    let spans: Vec<&str> = code(text).into_iter().map(|(_, span)| span).collect();
    assert_eq!(spans, ["b", "x y", "cargo t", "in a table"]);
    assert_eq!(links(text), [(2, "p.md#q")]);
    assert!(anchors(text).contains("a-b-c"));
    let lines: Vec<usize> = prose(text).map(|(number, _)| number).collect();
    assert_eq!(lines, [1, 2]);
}
