//! Draws the lines of a terminal, with their colours, as an SVG.

use std::fmt::Write as _;

/// The size of a character, in pixels.
const WIDTH: f64 = 7.8;
const HEIGHT: usize = 18;
/// The space around the text.
const BORDER: usize = 14;
const TEXT: &str = "#d8dee9";
const BACKGROUND: &str = "#1b1f27";
/// The colours 0 to 7 of a terminal.
const COLOURS: [&str; 8] = [
    "#3b4252", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#d8dee9",
];

/// The look of characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Look {
    colour: Option<usize>,
    is_bold: bool,
    is_dim: bool,
    is_reversed: bool,
}

/// Characters of one look.
#[derive(Debug, PartialEq, Eq)]
struct Run {
    text: String,
    look: Look,
}

impl Look {
    /// Applies the numbers of a sequence `ESC [ numbers m`.
    fn apply(&mut self, numbers: &str) {
        for number in numbers.split(';') {
            match number.parse().unwrap_or(0) {
                0 => *self = Self::default(),
                1 => self.is_bold = true,
                2 => self.is_dim = true,
                7 => self.is_reversed = true,
                22 => (self.is_bold, self.is_dim) = (false, false),
                27 => self.is_reversed = false,
                colour @ 30..=37 => self.colour = Some(colour - 30),
                39 => self.colour = None,
                _ => {}
            }
        }
    }
}

/// Divides a line at the changes of its look. `look` is the look at the beginning of the line. Afterwards, it is the
/// look at the end.
fn runs(line: &str, look: &mut Look) -> Vec<Run> {
    let mut parts = line.split("\x1b[");
    let mut runs = Vec::new();
    let mut add = |text: &str, look| {
        if !text.is_empty() {
            let text = text.to_owned();
            runs.push(Run { text, look });
        }
    };
    add(parts.next().unwrap_or(""), *look);
    for part in parts {
        let (numbers, text) = part.split_once('m').unwrap_or((part, ""));
        look.apply(numbers);
        add(text, *look);
    }
    runs
}

/// Draws lines that tmux has captured.
pub fn draw(lines: &[String]) -> String {
    let mut look = Look::default();
    let lines: Vec<Vec<Run>> = lines.iter().map(|line| runs(line, &mut look)).collect();
    let length = |runs: &Vec<Run>| runs.iter().map(|run| run.text.chars().count()).sum();
    let columns: usize = lines.iter().map(length).max().unwrap_or(0);
    let width = columns as f64 * WIDTH + 2.0 * BORDER as f64;
    let height = lines.len() * HEIGHT + 2 * BORDER;
    let mut picture = format!(
        "<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0}' height='{height}' font-family='ui-monospace,Menlo,Consolas,monospace' font-size='13'>\n<rect width='100%' height='100%' rx='6' fill='{BACKGROUND}'/>\n"
    );
    for (line, row) in lines.iter().zip(0..) {
        let mut column = 0;
        for run in line {
            draw_run(&mut picture, run, row, column);
            column += run.text.chars().count();
        }
    }
    picture + "</svg>\n"
}

fn draw_run(picture: &mut String, run: &Run, row: usize, column: usize) {
    let Run { text, look } = run;
    let length = text.chars().count() as f64 * WIDTH;
    let x = BORDER as f64 + column as f64 * WIDTH;
    let y = BORDER + row * HEIGHT;
    let colour = look.colour.map_or(TEXT, |colour| COLOURS[colour]);
    let colour = match look.is_reversed {
        true => {
            let box_of_text = format!(
                "<rect x='{x:.1}' y='{y}' width='{length:.1}' height='{HEIGHT}' fill='{colour}'/>\n"
            );
            picture.push_str(&box_of_text);
            BACKGROUND
        }
        false => colour,
    };
    if text.trim().is_empty() {
        return;
    }
    let bold = if look.is_bold {
        " font-weight='bold'"
    } else {
        ""
    };
    let dim = if look.is_dim { " opacity='0.6'" } else { "" };
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    // `textLength` keeps the columns aligned in each font.
    let written = writeln!(
        picture,
        "<text x='{x:.1}' y='{}' fill='{colour}'{bold}{dim} textLength='{length:.1}' xml:space='preserve'>{text}</text>",
        y + 13
    );
    written.expect("a text has room");
}

/// The address that contains a picture.
pub fn link(picture: &str) -> String {
    let mut link = String::from("data:image/svg+xml,");
    for byte in picture.bytes() {
        match byte {
            b'0'..=b'9'
            | b'a'..=b'z'
            | b'A'..=b'Z'
            | b'-'
            | b'.'
            | b'_'
            | b'/'
            | b':'
            | b'='
            | b','
            | b'\'' => {
                link.push(byte.into());
            }
            _ => {
                let written = write!(link, "%{byte:02X}");
                written.expect("a text has room");
            }
        }
    }
    link
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_divide_a_line_and_last_beyond_it() {
        let mut look = Look::default();
        let found = runs("a\x1b[1;7mb c\x1b[0;31m", &mut look);
        let bold = Look {
            is_bold: true,
            is_reversed: true,
            ..Look::default()
        };
        let run = |text: &str, look| Run {
            text: text.to_owned(),
            look,
        };
        assert_eq!(found, [run("a", Look::default()), run("b c", bold)]);
        let red = Look {
            colour: Some(1),
            ..Look::default()
        };
        assert_eq!(runs("d", &mut look), [run("d", red)]);
    }

    #[test]
    fn text_is_escaped() {
        let picture = draw(&["a < b & c".to_owned()]);
        assert!(picture.contains(">a &lt; b &amp; c</text>"), "{picture}");
        let address = link(&picture);
        assert!(
            !address.contains(['<', '>', ' ', '#', '\n', '"']),
            "{address}"
        );
    }
}
