//! Inputs for the tests named `fuzz_..`: arbitrary bytes, and valid texts with changes. `cargo xtask fuzz` runs these
//! tests with new inputs.

use std::fmt;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use crate::util::id::LeaseId;

/// Words that resemble valid ones, to confuse a parser.
const WORDS: [&str; 24] = [
    "",
    "-",
    "+",
    "+1",
    "-1",
    "00",
    "01",
    "0",
    "1",
    "10",
    "9007199254740993",
    "18014398509481983",
    "18014398509481984",
    "18446744073709551615",
    "18446744073709551616",
    "0123456789ABCDEF0123456789abcdef",
    "~",
    "!",
    "?",
    "lh1",
    "lht1",
    "\u{663}",
    "\u{1b}[2J",
    "\n",
];

/// One change of a text.
#[derive(Clone, Debug)]
enum Edit {
    Insert(Index, Vec<u8>),
    Replace(Index, u8),
    /// Changes the case of a letter.
    Case(Index),
    /// Removes this number of bytes, starting at the index.
    Remove(Index, usize),
    /// Repeats this number of bytes, starting at the index.
    Repeat(Index, usize),
    Cut(Index),
    Word(Index, &'static str),
    /// Exchanges two words.
    Swap(Index, Index),
}

impl Edit {
    fn change(&self, text: &mut Vec<u8>) {
        let place = |index: &Index, text: &[u8]| index.index(text.len() + 1);
        let range = |index: &Index, length: usize, text: &[u8]| {
            let start = place(index, text);
            start..text.len().min(start + length)
        };
        let words = |text: &[u8]| -> Vec<Vec<u8>> {
            text.split(|byte| *byte == b' ')
                .map(<[u8]>::to_vec)
                .collect()
        };
        match self {
            Self::Insert(at, bytes) => {
                let at = place(at, text);
                text.splice(at..at, bytes.iter().copied());
            }
            Self::Replace(at, byte) => {
                let range = range(at, 1, text);
                text[range].fill(*byte);
            }
            Self::Case(at) => {
                let range = range(at, 1, text);
                for byte in &mut text[range] {
                    *byte ^= u8::from(byte.is_ascii_alphabetic()) << 5;
                }
            }
            Self::Remove(at, length) => drop(text.drain(range(at, *length, text))),
            Self::Repeat(at, length) => {
                let again = range(at, *length, text);
                let bytes = text[again.clone()].to_vec();
                text.splice(again.end..again.end, bytes);
            }
            Self::Cut(at) => text.truncate(place(at, text)),
            Self::Word(at, word) => {
                let mut words = words(text);
                let at = at.index(words.len());
                words[at] = word.as_bytes().to_vec();
                *text = words.join(&b' ');
            }
            Self::Swap(one, other) => {
                let mut words = words(text);
                let (one, other) = (one.index(words.len()), other.index(words.len()));
                words.swap(one, other);
                *text = words.join(&b' ');
            }
        }
    }
}

fn edit() -> impl Strategy<Value = Edit> {
    let at = || any::<Index>();
    let character = || select(&b" +-0aA!~?\n"[..]);
    let byte = || prop_oneof![character(), any::<u8>()];
    prop_oneof![
        (at(), vec(any::<u8>(), 1..4)).prop_map(|(at, bytes)| Edit::Insert(at, bytes)),
        (at(), character()).prop_map(|(at, byte)| Edit::Insert(at, vec![byte])),
        (at(), length()).prop_map(|(at, n)| Edit::Insert(at, vec![b'x'; n])),
        (at(), byte()).prop_map(|(at, byte)| Edit::Replace(at, byte)),
        at().prop_map(Edit::Case),
        (at(), 1_usize..40).prop_map(|(at, length)| Edit::Remove(at, length)),
        (at(), 1_usize..40).prop_map(|(at, length)| Edit::Repeat(at, length)),
        at().prop_map(Edit::Cut),
        (at(), select(&WORDS[..])).prop_map(|(at, word)| Edit::Word(at, word)),
        (at(), at()).prop_map(|(one, other)| Edit::Swap(one, other)),
    ]
}

/// A length, sometimes up to 100,000, to find parsers that allocate too much.
fn length() -> impl Strategy<Value = usize> {
    prop_oneof![20 => 1_usize..300, 1 => 1_usize..100_000]
}

/// Bytes whose `Debug` is text.
#[derive(Clone)]
pub struct Bytes(pub Vec<u8>);

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "b\"{}\"", self.0.escape_ascii())
    }
}

/// Makes `valid` texts, most of them with changes, and arbitrary bytes.
pub fn bytes_like(valid: impl Strategy<Value = String>) -> impl Strategy<Value = Bytes> {
    let changed = (valid, vec(edit(), 0..4)).prop_map(|(text, edits)| {
        let mut bytes = text.into_bytes();
        edits.iter().for_each(|edit| edit.change(&mut bytes));
        bytes
    });
    prop_oneof![9 => changed, 1 => vec(any::<u8>(), 0..200)].prop_map(Bytes)
}

pub fn lease() -> impl Strategy<Value = LeaseId> {
    any::<u128>().prop_map(|id| LeaseId::decode(&format!("{id:032x}")).expect("32 digits"))
}

pub fn lease_text(lease: LeaseId) -> String {
    lease.encode(&mut [0; LeaseId::DIGITS]).to_owned()
}
