//! Saving and loading of the state, as bytes and as errors.

use std::ops::Range;

use crate::{
    codec::{
        call::Rows,
        plan::{CodecPlan, HEADER, NONFINITE, Run, TURN_FIELD},
    },
    cpu::numbers::{Number, is_kept, with_numbers},
    dlpack::View,
    ffi::error::{Result, error},
};

use super::{Codec, Half, WORKER, chunks::check_header};

/// Returns the address in a state of the scale of a segment (`half` 0) or of its part (1).
pub fn scale_in(plan: &CodecPlan, state: *mut u8, half: usize, segment: usize) -> *mut f32 {
    state.wrapping_add(plan.state_scales()[half] as usize + 4 * segment).cast()
}

/// Returns the address in a state of the number of the next turn.
pub fn turn(state: *mut u8) -> *mut u64 {
    state.wrapping_add(TURN_FIELD.start).cast()
}

/// Elements in a view of the server's errors: the elements of its parts, or all elements.
#[derive(Clone, Copy, PartialEq)]
enum Server {
    Parts,
    All,
}

/// Returns the byte ranges of the worker and of the server in a state: of scales, then of kept elements.
fn ranges(plan: &CodecPlan) -> [[Range<usize>; 2]; 2] {
    let [workers, servers] = plan.state_scales().map(|at| at as usize);
    let bytes = plan.state_bytes as usize;
    let first = |runs: &[Run]| match (runs.iter().find(|run| !run.raw), plan.rules.error) {
        (Some(run), Some(_)) => run.state as usize,
        _ => bytes,
    };
    let of_server = first(&plan.servers);
    let of_workers = first(&plan.workers).min(of_server);
    let end = if plan.server.is_some() { servers + (servers - workers) } else { servers };
    [[workers..servers, of_workers..of_server], [servers..end, of_server..bytes]]
}

impl Codec {
    /// Resets the state to its initial value and the flags to 0.
    pub fn reset(&mut self, plan: &CodecPlan) -> Result<()> {
        // SAFETY: the buffer is a state of this codec, of `state_bytes` bytes.
        unsafe { self.buffers[0].data().write_bytes(0, plan.state_bytes as usize) };
        (self.worker, self.server, self.begun) = (Half::default(), Half::default(), false);
        (self.flags, self.since_commit) = (0, 0);
        self.scales.fill(0.0);
        Ok(())
    }

    /// Writes the valid state.
    pub fn state_out(&mut self, plan: &CodecPlan, dst: &View<'_>) -> Result<()> {
        let (out, bytes) = (dst.data(), plan.state_bytes as usize);
        let mut header = plan.state_header();
        let states = [self.worker, self.server].map(|half| self.buffers_of(half).0);
        // SAFETY: all ranges lie within a state; `out` has as many bytes as the codec's states, at any address.
        unsafe {
            header[TURN_FIELD].copy_from_slice(&turn(states[1]).read().to_le_bytes());
            out.copy_from_nonoverlapping(header.as_ptr(), HEADER);
            out.add(HEADER).write_bytes(0, ranges(plan)[0][1].start.min(bytes) - HEADER);
            for (state, ranges) in states.into_iter().zip(ranges(plan)) {
                for range in ranges {
                    out.add(range.start).copy_from_nonoverlapping(state.add(range.start), range.len());
                }
            }
        }
        Ok(())
    }

    /// Loads a state that `state_out` wrote. Refuses a state that `state_out` cannot have written.
    pub fn state_in(&mut self, plan: &CodecPlan, src: &View<'_>) -> Result<()> {
        let from = src.data();
        // SAFETY: `src` has the bytes of a state, at any address.
        let header = unsafe { from.cast::<[u8; HEADER]>().read_unaligned() };
        check_header(format_args!("{}", src.name()), &header, &plan.state_header(), TURN_FIELD)?;
        self.family.check_state(plan, src)?;
        let halves = ranges(plan);
        let states = [self.worker, self.server].map(|half| self.buffers_of(half).0);
        let mut of_turn = [0; 8];
        of_turn.copy_from_slice(&header[TURN_FIELD]);
        // SAFETY: all ranges lie within a state; `src` has as many bytes, at any address. Padding stays +0: not copied.
        unsafe {
            turn(states[1]).write(u64::from_le_bytes(of_turn));
            for (state, [scales, _]) in states.into_iter().zip(&halves) {
                state.add(scales.start).copy_from_nonoverlapping(from.add(scales.start), scales.len());
            }
            for (state, runs) in states.into_iter().zip([&plan.workers, &plan.servers]) {
                for run in runs.iter().filter(|run| !run.raw) {
                    let bytes = plan.rules.error.map_or(0, |error| run.elements as usize * error.size);
                    state.add(run.state as usize).copy_from_nonoverlapping(from.add(run.state as usize), bytes);
                }
            }
        }
        Ok(())
    }

    /// Writes the errors that the next step will read, in float32: the worker's and the server's.
    pub fn errors_out(&mut self, plan: &CodecPlan, worker: Option<&View<'_>>, server: Option<&View<'_>>) -> Result<()> {
        let family = self.family;
        if let Some(row) = worker.filter(|_| plan.row_elements != plan.elements) {
            // SAFETY: `row` is a view of `row_elements` float32.
            unsafe { row.data().write_bytes(0, plan.row_elements as usize * size_of::<f32>()) };
        }
        self.for_halves(plan, [worker, server], Server::Parts, |run, scale, kept, errors| {
            // SAFETY: `scale` and `kept` belong to the run in a state; `errors` has a float32 for each of its elements.
            unsafe { family.errors_of(plan, run, scale, kept, errors) };
        });
        Ok(())
    }

    /// Loads errors, rounded to the dtype of errors.
    pub fn errors_in(&mut self, plan: &CodecPlan, worker: Option<&View<'_>>, server: Option<&View<'_>>) -> Result<()> {
        self.keep_errors(plan, (worker, &Rows::ONE), server, Server::Parts);
        Ok(())
    }

    /// Loads the errors of another world. `workers`: rows of all elements, which `rows` combines to this rank's errors.
    /// `server`: the reducers' errors of all elements, of which this codec loads its parts.
    pub fn errors_of_world_in(
        &mut self, plan: &CodecPlan, workers: Option<&View<'_>>, rows: &Rows, server: Option<&View<'_>>,
    ) -> Result<()> {
        self.keep_errors(plan, (workers, rows), server, Server::All);
        Ok(())
    }

    fn keep_errors(
        &mut self, plan: &CodecPlan, (workers, rows): (Option<&View<'_>>, &Rows), server: Option<&View<'_>>, of: Server,
    ) {
        let row = plan.row_elements as usize;
        let (family, mut nonfinite) = (self.family, false);
        for (halves, rows) in [([workers, None], rows), ([None, server], &Rows::ONE)] {
            self.for_halves(plan, halves, of, |run, scale, kept, errors| {
                // SAFETY: `scale` and `kept` belong to the run in a state.
                nonfinite |= unsafe { family.keep(plan, run, scale, kept, &|index| of_rows(errors, row, rows, index)) };
            });
        }
        // Loading errors is not part of a step, so no commit takes a step back for it.
        self.flags |= if nonfinite { NONFINITE } else { 0 };
    }

    /// Calls `work` with each run of each half that has a view. The other arguments are the addresses of its scale, if
    /// it has one, of its kept elements, and of its errors in the view.
    fn for_halves(
        &mut self, plan: &CodecPlan, errors: [Option<&View<'_>>; 2], of: Server,
        mut work: impl FnMut(&Run, *mut f32, *mut u8, *mut f32),
    ) {
        let halves = [(self.worker, &plan.workers), (self.server, &plan.servers)];
        for (half, ((valid, runs), errors)) in halves.into_iter().zip(errors).enumerate() {
            let Some(errors) = errors else { continue };
            // Runs lie at their index in a row of all elements; the server's parts follow one another.
            let in_row = half == WORKER || of == Server::All;
            let (state, first) = (self.buffers_of(valid).0, errors.data().cast::<f32>());
            let mut behind = 0;
            for run in runs {
                let at = first.wrapping_add(if in_row { run.row } else { behind } as usize);
                let (scale, kept) = (scale_in(plan, state, half, run.segment), state.wrapping_add(run.state as usize));
                work(run, scale, kept, at);
                behind += run.elements;
            }
        }
    }
}

/// Refuses a state whose kept elements are not finite: no later step would ever be committed.
pub fn check_kept(plan: &CodecPlan, state: &View<'_>, who: &str) -> Result<()> {
    with_numbers!(plan.rules.values, plan.rules.error, |_G, E| check_kept_as::<E>(plan, state, who))
}

fn check_kept_as<E: Number>(plan: &CodecPlan, state: &View<'_>, who: &str) -> Result<()> {
    for run in plan.workers.iter().chain(&plan.servers).filter(|run| is_kept::<E>() && !run.raw) {
        let kept = state.data().wrapping_add(run.state as usize);
        // SAFETY: `state` has the bytes of a state, with all elements of every run, at any address.
        let number = |index: usize| unsafe { E::load(kept, index) };
        if let Some(index) = (0..run.elements as usize).find(|&index| !number(index).is_finite()) {
            return Err(error!(
                Corrupt,
                "{}: {:?} is kept of element {index} of segment {}, and {who} keeps nothing that is not finite",
                state.name(),
                number(index),
                run.segment,
            ));
        }
    }
    Ok(())
}

/// Combines an element's errors in rows of `row` elements to one error, as `rows` defines.
fn of_rows(errors: *const f32, row: usize, rows: &Rows, index: usize) -> f32 {
    // SAFETY: the view has these rows of float32, at any address.
    let of_row = |number: usize| unsafe { errors.add((rows.first + number) * row + index).read_unaligned() };
    let sum = (0..rows.count).fold(rows.start, |sum, number| sum + of_row(number) / rows.divisor);
    sum / rows.divisor_of_sum * rows.factor
}
