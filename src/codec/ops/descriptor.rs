//! Options of a codec, and the checks of their combinations.

use crate::{
    codec::plan::{CodecPlan, ErrorKind, Kind, NonFinite, Reduction, Rules, ScaleRule, layout::Family},
    dlpack::{Device, Dtype},
    ffi::error::{Result, error},
};

/// Options of a codec, as the caller gives them.
pub struct Descriptor<'a> {
    pub kind: Kind,
    pub device: Device,
    pub values: Dtype,
    pub results: Dtype,
    pub error: ErrorKind,
    pub scale: ScaleRule,
    pub nonfinite: NonFinite,
    pub reduction: Reduction,
    /// Factor of a carried error; 0 means 1.
    pub beta: f32,
    /// Number of elements of each segment. None: one segment, of `elements`.
    pub segments: Option<&'a [i64]>,
    /// A byte for each segment, not 0 if it is raw. None: no segment is raw.
    pub raw: Option<&'a [u8]>,
    pub elements: i64,
    /// Number of chunks; 0 means 1.
    pub n_chunks: usize,
    /// Number of the chunk that is reduced plus 1; 0 if none is.
    pub server: u64,
}

impl Descriptor<'_> {
    /// Returns the plan of all elements within a node, with a chunk for each of its ranks.
    pub fn plan_of_node(&self, ranks: usize) -> Result<CodecPlan> {
        if self.kind == Kind::Sign {
            return Err(error!(
                InvalidArgument,
                "options: GC_CODEC_SIGN over nodes; another codec expected, because a majority needs the bits of every rank"
            ));
        }
        Descriptor { n_chunks: ranks, server: 0, error: ErrorKind::None, ..*self }.plan()
    }

    pub fn plan(&self) -> Result<CodecPlan> {
        let one = [self.elements];
        let segments = match self.segments {
            None => &one,
            Some(_) if self.elements != 0 => {
                return Err(error!(
                    InvalidArgument,
                    "options: n_elements {} beside segments, which say how many there are; 0 expected", self.elements
                ));
            }
            Some(segments) => segments,
        };
        if let Some(index) = segments.iter().position(|&count| count < 0) {
            return Err(error!(InvalidArgument, "options: segment {index} has {} elements", segments[index]));
        }
        self.check_family()?;
        if !self.beta.is_finite() {
            return Err(error!(InvalidArgument, "options: beta {} is not finite", self.beta));
        }
        let n_chunks = self.n_chunks.max(1);
        let server = match self.server {
            0 => None,
            server if server <= n_chunks as u64 => Some(server as usize - 1),
            server => {
                return Err(error!(
                    InvalidArgument,
                    "options: server {server}; 0 or 1 more than the number of one of {n_chunks} chunks expected"
                ));
            }
        };
        let rules = Rules {
            kind: self.kind,
            values: self.values,
            results: self.results,
            error: self.error()?,
            scale: self.scale,
            reduction: self.reduction,
            beta: if self.beta == 0.0 { 1.0 } else { self.beta },
            policy: self.nonfinite,
            ranks: 1,
        };
        CodecPlan::new(rules, segments, self.raw.unwrap_or(&[]), n_chunks, server)
    }

    /// Refuses options of the other family.
    fn check_family(&self) -> Result<()> {
        let kind = self.kind.name();
        if self.kind.format().family == Family::Blocks {
            return match self.scale {
                ScaleRule::Rms => Ok(()),
                scale => Err(error!(
                    InvalidArgument,
                    "options: scale {}, and {kind} computes its scales in one way; 0 expected", scale as i32
                )),
            };
        }
        if self.raw.is_some() {
            return Err(error!(InvalidArgument, "options: raw, and {kind} has no raw segments; NULL expected"));
        }
        if self.kind == Kind::Sign && self.reduction == Reduction::Sum {
            return Err(error!(
                InvalidArgument,
                "options: reduction 1, and {kind} sends the majority and no sum; 0 expected"
            ));
        }
        Ok(())
    }

    fn error(&self) -> Result<Option<Dtype>> {
        match (self.kind, self.error) {
            // Float32 is the default, so SIGN accepts it.
            (_, ErrorKind::None) | (Kind::Sign, ErrorKind::Float32) => Ok(None),
            (Kind::Sign, ErrorKind::Bfloat16) => {
                Err(error!(InvalidArgument, "options: error GC_ERROR_BFLOAT16, and GC_CODEC_SIGN keeps no errors"))
            }
            (_, ErrorKind::Float32) => Ok(Some(Dtype::F32)),
            (_, ErrorKind::Bfloat16) => Ok(Some(Dtype::BF16)),
        }
    }
}
