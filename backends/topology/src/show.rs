//! The machine as text.

use crate::live::human;
use farlane_zero_copy::topology::{Function, Machine, Node};
use std::fmt::Write as _;

/// Numbers as the kernel lists them: `0-3,8`.
#[must_use]
pub fn ranges(numbers: &[u32]) -> String {
    let runs = numbers.chunk_by(|a, b| a.checked_add(1) == Some(*b));
    let run = |run: &[u32]| match run {
        [first, .., last] => format!("{first}-{last}"),
        [one] => one.to_string(),
        [] => String::new(),
    };
    runs.map(run).collect::<Vec<_>>().join(",")
}

/// A node's processors, in words.
#[must_use]
pub fn processors(machine: &dyn Machine, node: Node) -> String {
    let cpus = machine.cpus(node);
    match cpus.len() {
        0 => "no processors".to_owned(),
        1 => format!("processor {}", ranges(&cpus)),
        _ => format!("processors {}", ranges(&cpus)),
    }
}

/// A node's memory, in words.
#[must_use]
pub fn memory(machine: &dyn Machine, node: Node) -> String {
    match machine.memory_bytes(node) {
        0 => "memory not known".to_owned(),
        // Precise to 15 digits, of which three are shown.
        #[allow(clippy::cast_precision_loss)]
        bytes => format!("{} of memory", human(bytes as f64)),
    }
}

/// What a function is, where it is, and what the system calls it.
#[must_use]
pub fn function(function: &Function) -> String {
    let names = function.names.join(" ");
    let text = format!("{} {} {names}", function.class, function.address);
    text.trim_end().to_owned()
}

/// All of it.
#[must_use]
pub fn text(machine: &dyn Machine, functions: &[Function]) -> String {
    let mut out = String::new();
    let nodes = machine.nodes();
    for &node in &nodes {
        let (processors, memory) = (processors(machine, node), memory(machine, node));
        let _ = writeln!(out, "node {node}: {processors}, {memory}");
        for found in functions.iter().filter(|f| f.node == Some(node)) {
            let _ = writeln!(out, "  {}", function(found));
        }
    }
    let mut lost = functions.iter().filter(|f| f.node.is_none()).peekable();
    if lost.peek().is_some() {
        let _ = writeln!(out, "on no node, as far as the firmware says:");
        for found in lost {
            let _ = writeln!(out, "  {}", function(found));
        }
    }
    if nodes.len() > 1 {
        let _ = writeln!(
            out,
            "distances (10 is near), from processors of a row to memory of a column:"
        );
        let _ = write!(out, "        ");
        for to in &nodes {
            let _ = write!(out, "{to:>6}");
        }
        out.push('\n');
        for &from in &nodes {
            let _ = write!(out, "  {from:>6}");
            for &to in &nodes {
                let distance = machine.distance(from, to);
                let distance = distance.map_or_else(|| "?".to_owned(), |d| d.to_string());
                let _ = write!(out, "{distance:>6}");
            }
            out.push('\n');
        }
    } else {
        let _ = writeln!(
            out,
            "One node: all memory is local, and workers are not pinned."
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_zero_copy::topology::{Class, Described};

    #[test]
    fn numbers_are_listed_as_the_kernel_does() {
        assert_eq!(ranges(&[]), "");
        assert_eq!(ranges(&[3]), "3");
        assert_eq!(ranges(&[0, 1, 2, 8, 10, 11]), "0-2,8,10-11");
    }

    #[test]
    fn everything_stands_at_its_node() {
        let machine = Described::new(&[&[0, 1], &[], &[2]]);
        let function = |node, class, names: &[&str]| Function {
            node,
            class,
            address: "0000:01:00.0".parse().unwrap(),
            names: names.iter().map(|&n| n.to_owned()).collect(),
        };
        let functions = [
            function(Some(Node(2)), Class::Nvme, &["nvme0"]),
            function(None, Class::Gpu, &[]),
        ];
        let text = text(&machine, &functions);
        assert_eq!(
            text,
            "node 0: processors 0-1, 1.07 GB of memory\n\
             node 1: no processors, 1.07 GB of memory\n\
             node 2: processor 2, 1.07 GB of memory\n\
             \x20 NVMe 0000:01:00.0 nvme0\n\
             on no node, as far as the firmware says:\n\
             \x20 GPU 0000:01:00.0\n\
             distances (10 is near), from processors of a row to memory of a column:\n\
             \x20            0     1     2\n\
             \x20      0    10    21    32\n\
             \x20      1    21    10    21\n\
             \x20      2    32    21    10\n"
        );
    }
}
