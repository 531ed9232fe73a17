//! The machine as a drawing: a box a node, with what is on it, and the distances between them.

use crate::show;
use crate::svg::{Svg, colour};
use farlane_zero_copy::topology::{Function, Machine};

const BOX: f64 = 260.0;
const GAP: f64 = 120.0;
const LINE: f64 = 18.0;
const MARGIN: f64 = 20.0;
/// Nodes beside each other; more go below.
const COLUMNS: usize = 4;

/// All of it.
#[must_use]
pub fn draw(machine: &dyn Machine, functions: &[Function]) -> String {
    let nodes = machine.nodes();
    let mut cells: Vec<_> = nodes
        .iter()
        .map(|&node| {
            let of_node = functions.iter().filter(|f| f.node == Some(node));
            let mut lines = vec![show::processors(machine, node), show::memory(machine, node)];
            lines.extend(of_node.map(show::function));
            (format!("node {node}"), colour(node.0), lines)
        })
        .collect();
    let lost: Vec<_> = functions
        .iter()
        .filter(|f| f.node.is_none())
        .map(show::function)
        .collect();
    if !lost.is_empty() {
        cells.push(("on no node".to_owned(), "#bbbbbb", lost));
    }

    let mut svg = Svg::default();
    let mut top = MARGIN;
    let mut width = 0.0_f64;
    for (row, row_cells) in cells.chunks(COLUMNS).enumerate() {
        let lines = row_cells.iter().map(|(_, _, lines)| lines.len());
        let height = 44.0 + LINE * lines.fold(0, usize::max) as f64;
        let mut left = MARGIN;
        for (column, (title, colour, lines)) in row_cells.iter().enumerate() {
            let index = row * COLUMNS + column;
            if column > 0
                && let (Some(&here), Some(&before)) = (nodes.get(index), nodes.get(index - 1))
                && let Some(distance) = machine.distance(before, here)
            {
                let middle = top + height / 2.0;
                let style = "stroke=\"#333333\" stroke-width=\"2\"";
                svg.line((left - GAP, middle), (left, middle), style);
                let text = format!("distance {distance}");
                svg.text((left - GAP / 2.0, middle - 6.0), "middle", 12, &text);
            }
            let style = format!("fill=\"white\" stroke=\"{colour}\" stroke-width=\"2\" rx=\"6\"");
            svg.rectangle([left, top, BOX, height], &style);
            let style = format!("fill=\"{colour}\" rx=\"6\"");
            svg.rectangle([left, top, BOX, 26.0], &style);
            svg.text((left + 10.0, top + 18.0), "start", 14, title);
            let mut y = top + 26.0;
            for line in lines {
                y += LINE;
                svg.text((left + 10.0, y), "start", 12, line);
            }
            left += BOX + GAP;
        }
        width = width.max(left - GAP + MARGIN);
        top += height + MARGIN;
    }
    svg.document(width, top)
}

#[cfg(test)]
mod tests {
    use super::*;
    use farlane_zero_copy::topology::{Class, Described, Node};

    #[test]
    fn each_node_has_a_box_with_what_is_on_it() {
        let function = |node, address: &str| Function {
            node,
            class: Class::Network,
            address: address.parse().unwrap(),
            names: vec!["eth<0>".to_owned()],
        };
        let functions = [
            function(Some(Node(1)), "0000:81:00.0"),
            function(None, "0000:03:00.0"),
        ];
        let machine = Described::new(&[&[0], &[1], &[2], &[3], &[4]]);
        let drawing = draw(&machine, &functions);
        // A background, and a box and its head each.
        assert_eq!(drawing.matches("<rect").count(), 1 + 2 * 6);
        assert_eq!(drawing.matches("distance 21").count(), 3);
        assert!(drawing.contains("network 0000:81:00.0 eth&lt;0&gt;"));
        assert!(drawing.contains("on no node"));
    }
}
