//! Encodes script calls and other commands as RESP.

use crate::command::encoder::Encoder;
use crate::command::script::{FurtherKeys, Script};
use crate::command::{CallContext, Command, redisson};
use crate::config::key::{Key, KeyLayout};
use crate::config::other_library::{OtherLibrary, python_signal};
use crate::util::slot::Slot;
use crate::wire::scripts::{ScriptContext, ScriptRef};

/// Appends one call of `script` for `commands`, which all have this script, to `buffer`. On a Cluster, their keys have
/// the same slot.
pub fn encode<'a>(
    buffer: &mut Vec<u8>,
    call: ScriptRef<'_>,
    script: &Script,
    context: &ScriptContext,
    commands: impl ExactSizeIterator<Item = &'a Command> + Clone,
) {
    let layout = script.layout;
    let queued = commands
        .clone()
        .filter(|command| command.has_queue_key() && !layout.redisson);
    let queue_count = queued.clone().count();
    let (counter, mark) = (usize::from(layout.counter), usize::from(layout.mark));
    let mark_at_end = usize::from(layout.mark_at_end && context.quarantine.is_some());
    let values = commands.clone().filter_map(Command::value_key);
    let value_count = values.clone().count();
    let further_count = layout.further.map_or(0, |_| commands.len());
    let keys =
        commands.len() + queue_count + value_count + counter + mark + mark_at_end + further_count;
    let fenced = layout.further == Some(FurtherKeys::TokenCounters);
    let fixed_args = usize::from(layout.holder)
        + usize::from(layout.limit)
        + usize::from(fenced)
        + mark
        + mark_at_end;
    let shard = match layout.redisson {
        // Redisson has shard channels of its own.
        true => (context.layout != KeyLayout::Single).then(|| "shard".to_owned()),
        false => context.shard_channel_start().filter(|_| queue_count > 0),
    };
    let shard = shard.filter(|_| layout.shard_channel);
    let args = commands.len() * layout.arguments + fixed_args + usize::from(shard.is_some());
    let mut out = Encoder(buffer);
    out.array(3 + keys + args);
    match call {
        ScriptRef::Hash(hash) => {
            out.text("EVALSHA");
            out.text(hash);
        }
        ScriptRef::Text(text) => {
            out.text("EVAL");
            out.text(text);
        }
    }
    out.number(keys as u64);
    if layout.counter {
        let key = commands.clone().find_map(Command::key);
        let tag = key.map_or("", |key| key.fence_tag(context.layout));
        out.parts(&[&context.fence_counter, tag]);
    }
    if layout.mark {
        out.text(&context.data_mark);
    }
    for command in commands.clone() {
        out.text(command.key().map_or("", |key| key.in_redis()));
    }
    for key in queued.filter_map(Command::key) {
        out.parts(&key.queue_parts(context.layout));
    }
    for key in values {
        out.text(key.in_redis());
    }
    if mark_at_end > 0 {
        out.text(&context.data_mark);
    }
    if let Some(further) = layout.further {
        for key in commands.clone().filter_map(Command::key) {
            further_key(&mut out, further, context, key);
        }
    }
    if layout.holder {
        out.text(context.holder.as_str());
    }
    if layout.mark {
        out.millis(context.quarantine());
    }
    if layout.limit {
        out.number(context.max_value as u64);
    }
    if fenced {
        out.text(if is_fenced(context) { "fenced" } else { "" });
    }
    let of_call = CallContext {
        holder: &context.holder,
        other_library: context.other_library,
        quarantine: context.quarantine(),
    };
    for command in commands {
        command.arguments(&mut out, of_call);
    }
    if let Some(shard) = shard {
        out.text(&shard);
    }
    if mark_at_end > 0 {
        out.millis(context.quarantine());
    }
}

/// Writes the further key of the lock at `key`.
fn further_key(out: &mut Encoder<'_>, further: FurtherKeys, context: &ScriptContext, key: &Key) {
    match further {
        FurtherKeys::Signals => out.parts(&python_signal(key.in_redis())),
        FurtherKeys::TokenCounters if is_fenced(context) => {
            out.parts(&redisson::token_counter(key));
        }
        FurtherKeys::TokenCounters => {
            out.parts(&[&context.fence_counter, key.fence_tag(context.layout)]);
        }
        FurtherKeys::FairQueues => {
            let queue = redisson::fair_queue(key);
            // On a Cluster, the script can read a queue in the slot of the lock only.
            match !context.has_slots() || Slot::of(&queue.concat()) == key.slot() {
                true => out.parts(&queue),
                false => out.text(key.in_redis()),
            }
        }
    }
}

/// Whether the tokens are the numbers of Redisson's counters.
fn is_fenced(context: &ScriptContext) -> bool {
    context.other_library == Some(OtherLibrary::Redisson { fenced: true })
}

/// Appends a command that is no script call.
pub fn encode_words<'a>(
    buffer: &mut Vec<u8>,
    command: &str,
    words: impl ExactSizeIterator<Item = &'a str>,
) {
    let mut out = Encoder(buffer);
    out.array(1 + words.len());
    out.text(command);
    words.for_each(|word| out.text(word));
}
