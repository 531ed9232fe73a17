//! Drawings as SVG.

use farlane_abi::width::to_usize;
use std::fmt::{Display, Write as _};

/// Colours of nodes and of their workers (Okabe and Ito: they can be told apart by everybody).
pub const COLOURS: [&str; 6] = [
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#999999",
];

/// That of a node.
#[must_use]
pub fn colour(node: u32) -> &'static str {
    let index = to_usize(node.into()) % COLOURS.len();
    COLOURS.get(index).copied().unwrap_or("#000000")
}

/// A drawing that grows.
#[derive(Debug, Default)]
pub struct Svg {
    body: String,
}

/// What may not stand in text.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

impl Svg {
    /// A rectangle: left, top, width, height; `style` are its attributes.
    pub fn rectangle(&mut self, [x, y, w, h]: [f64; 4], style: &str) {
        let _ = writeln!(
            self.body,
            r#"<rect x="{x:.1}" y="{y:.1}" width="{w:.1}" height="{h:.1}" {style}/>"#
        );
    }

    /// A line.
    pub fn line(&mut self, from: (f64, f64), to: (f64, f64), style: &str) {
        let _ = writeln!(
            self.body,
            r#"<line x1="{:.1}" y1="{:.1}" x2="{:.1}" y2="{:.1}" {style}/>"#,
            from.0, from.1, to.0, to.1
        );
    }

    /// An area between corners, or with `kind` `polyline` a line through them.
    pub fn path(&mut self, kind: &str, points: &[(f64, f64)], style: &str) {
        let _ = write!(self.body, "<{kind} points=\"");
        for (x, y) in points {
            let _ = write!(self.body, "{x:.1},{y:.1} ");
        }
        let _ = writeln!(self.body, "\" {style}/>");
    }

    /// Text at its baseline; `anchor` is `start`, `middle` or `end`.
    pub fn text(&mut self, (x, y): (f64, f64), anchor: &str, size: u32, text: &impl Display) {
        let text = escaped(&text.to_string());
        let _ = writeln!(
            self.body,
            r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" font-size="{size}">{text}</text>"#
        );
    }

    /// The document, of this many pixels.
    #[must_use]
    pub fn document(self, width: f64, height: f64) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
             viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"sans-serif\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{}</svg>\n",
            self.body
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_leave_its_element() {
        let mut svg = Svg::default();
        svg.text((1.0, 2.0), "start", 9, &"</text><script>\"&\n");
        let document = svg.document(10.0, 10.0);
        assert!(document.contains(">&lt;/text&gt;&lt;script&gt;&quot;&amp; </text>"));
    }
}
