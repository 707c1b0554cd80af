//! Makes text of other users printable on a line of a log.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

/// Puts `text` on one line. Escapes control characters, line separators and characters that change the direction of
/// text. Replaces the text after `longest` bytes by `..`.
pub fn printable(text: &str, longest: usize) -> Cow<'_, str> {
    if text.len() <= longest && !text.contains(is_unsafe) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::new();
    for c in text.chars() {
        let end = shown.len();
        if is_unsafe(c) {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
        if shown.len() > longest {
            shown.truncate(end);
            shown.push_str("..");
            break;
        }
    }
    Cow::Owned(shown)
}

/// Shows a duration in whole milliseconds, and at least 1 ms: the exact value of a measured time has many digits.
pub struct Shown(pub Duration);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX);
        write!(f, "{:?}", Duration::from_millis(millis.max(1)))
    }
}

/// Number of digits of a lease id.
const ID_DIGITS: usize = 32;

/// Replaces each run of 32 or more hexadecimal digits, which may be a lease id, by `<id>`.
pub fn without_ids(text: &str) -> Cow<'_, str> {
    if !has_id(text) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::new();
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.bytes().take_while(u8::is_ascii_hexdigit).count();
        let (run, behind) = rest.split_at(digits);
        shown.push_str(if digits < ID_DIGITS { run } else { "<id>" });
        let next = behind.find(|c: char| c.is_ascii_hexdigit());
        let (others, behind) = behind.split_at(next.unwrap_or(behind.len()));
        shown.push_str(others);
        rest = behind;
    }
    Cow::Owned(shown)
}

/// Whether `text` has a run of 32 or more hexadecimal digits.
pub fn has_id(text: &str) -> bool {
    let mut runs = text.split(|c: char| !c.is_ascii_hexdigit());
    runs.any(|run| run.len() >= ID_DIGITS)
}

fn is_unsafe(c: char) -> bool {
    let separates_lines = matches!(c, '\u{2028}' | '\u{2029}');
    let sets_direction = matches!(
        c,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    );
    c.is_control() || separates_lines || sets_direction
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsafe_characters_are_escaped_and_others_stay() {
        assert_eq!(printable("a\n\u{1b}[2J", 99), "a\\n\\u{1b}[2J");
        assert_eq!(
            printable("\u{7f}\u{9b}\u{2028}", 99),
            "\\u{7f}\\u{9b}\\u{2028}"
        );
        assert_eq!(printable("\u{202e}\u{2069}", 99), "\\u{202e}\\u{2069}");
        assert_eq!(printable("ключ 🔒 \"\\", 99), "ключ 🔒 \"\\");
    }

    #[test]
    fn times_are_shown_in_whole_milliseconds() {
        for (nanos, shown) in [
            (0, "1ms"),
            (999, "1ms"),
            (499_994_449, "499ms"),
            (5_000_000_000, "5s"),
            (1_250_000_001, "1.25s"),
        ] {
            assert_eq!(Shown(Duration::from_nanos(nanos)).to_string(), shown);
        }
    }

    #[test]
    fn runs_of_32_digits_are_left_out() {
        let id = "0123456789abcdef0123456789ABCDEF";
        assert_eq!(without_ids(&id[1..]), &id[1..]);
        assert_eq!(without_ids(id), "<id>");
        assert_eq!(
            without_ids(&format!("é:{id}00, x{id}x {} bad é", &id[..31])),
            format!("é:<id>, x<id>x {} bad é", &id[..31])
        );
        assert!(has_id(&format!("x{id}")) && !has_id(&id[1..]));
    }

    #[test]
    fn text_is_cut_between_characters() {
        assert_eq!(printable("12345", 5), "12345");
        assert_eq!(printable("123456", 5), "12345..");
        assert_eq!(printable("1234é", 5), "1234..");
        assert_eq!(printable("123\n", 4), "123..");
    }
}
